"""Checkpoints as a user meets them: saved beside training, resumed with other settings, kept, released, refused."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mirror import same

import offload
from offload.checkpoint.commit import CommitJob
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.saves import Saves
from offload.checkpoint.stores import find_stores
from offload.engine.seals import Seals
from offload.schedule.operations import SaveTile

SIZES = (5000, 1, 3000, 20_000, 70)


class Run:
    """Parameters, an optimizer and gradients that depend on the step alone."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 0, sizes=SIZES, **config: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in sizes]
        self.named = [(f"layer{number}.weight", p) for number, p in enumerate(self.parameters)]
        groups = [
            {"params": self.named[:2], "weight_decay": 0.1, "lr": 1e-2},
            {"params": self.named[2:], "lr": 3e-3},
        ]
        config = {"subgroup_numel": 1024, **config}
        self.optimizer = offload.AdamW(groups, betas=(0.9, 0.95), offload=offload.OffloadConfig(**config))
        self.step = 0

    def train(self, steps: int = 1, sizes_of_gradients: float = 1.0) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 + self.step)
            for number, parameter in enumerate(self.parameters):
                if (self.step + number) % 4:  # some have none
                    gradient = torch.randn(parameter.shape, generator=generator) * sizes_of_gradients
                    parameter.grad = gradient.to(parameter.dtype)
            self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def save(self, folder: Path, **more: Any) -> None:
        """Save a checkpoint, and wait until it is whole."""
        self.optimizer.save_checkpoint(folder, **more)
        self.optimizer.wait_checkpoint()

    def state(self) -> list[torch.Tensor]:
        found = [parameter.detach().clone() for parameter in self.parameters]
        for number, parameter in enumerate(self.parameters):
            found += self.optimizer.state_for(parameter).values()
            found.append(torch.tensor(self.optimizer.engine.step_count(number)))
        return found

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.optimizer.close()


def assert_holds(folder: Path, state: list[torch.Tensor] | None, extra: Any = None, **more: Any) -> None:
    """Check that a new session in memory can load a checkpoint, and has that state then, whatever it is if None."""
    with Run(seed=3, **more) as other:
        assert other.optimizer.load_checkpoint(folder) == extra
        assert state is None or same(other.state(), state)


def assert_refused(folder: Path, words: str) -> None:
    with Run() as other, pytest.raises(offload.CheckpointError, match=words):
        other.optimizer.load_checkpoint(folder)


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[list[Path]]:
    found = [tmp_path / name for name in ("a", "b", "c")]
    for path in found:
        path.mkdir()
    return found


PLACES = {
    "streamed": lambda paths: {"host_memory": 0, "paths": paths[:1]},
    "two paths": lambda paths: {"host_memory": 0, "paths": paths[:2]},
    "half": lambda paths: {"host_memory": 160_000, "paths": paths[:1]},
    "resident": lambda paths: {"host_memory": "1GiB", "paths": paths[:1]},
    "memory": lambda paths: {},
}


def test_what_a_load_will_refuse_is_told_when_it_is_saved(
    tmp_path: Path, paths: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with Run(torch.bfloat16, **PLACES["half"](paths)) as run:
        run.train(1)
        run.save(tmp_path / "ck", extra={"rng": torch.get_rng_state(), "step": 3})
        assert not caplog.records
        run.save(tmp_path / "ck", extra={"folder": tmp_path})
        kind = f"{type(tmp_path).__module__}.PosixPath"
        assert f"extra holds {kind}: load_checkpoint will need weights_only=False" in caplog.text
        assert run.optimizer.load_checkpoint(tmp_path / "ck", weights_only=False) == {"folder": tmp_path}


def test_what_extra_cannot_hold_is_named_in_a_sentence(tmp_path: Path, paths: list[Path]) -> None:
    with Run(torch.bfloat16, **PLACES["half"](paths)) as run:
        run.train(1)
        run.save(tmp_path / "ck", extra={"order": np.arange(3)})
        with pytest.raises(
            offload.CheckpointError, match=r"it holds numpy.*from_numpy.*weights_only=False"
        ) as caught:
            run.optimizer.load_checkpoint(tmp_path / "ck")
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_hyperparameters_are_those_of_the_checkpoint_unless_it_is_told_to_leave_them(tmp_path: Path) -> None:
    with Run() as run:
        run.optimizer.param_groups[0]["lr"] = 0.1 + 0.2
        run.save(tmp_path / "ck")
        for options, expected in (({"hyperparameters": False}, 1.0), ({}, 0.1 + 0.2)):
            run.optimizer.param_groups[0]["lr"] = 1.0
            run.optimizer.load_checkpoint(tmp_path / "ck", **options)
            assert run.optimizer.param_groups[0]["lr"] == expected


def test_the_last_ones_are_kept_and_older_ones_say_so(tmp_path: Path, paths: list[Path]) -> None:
    states = {}
    with Run(**PLACES["half"](paths), checkpoints_kept=2) as run:
        for number in range(4):
            run.train(2)
            states[number] = run.state()
            run.optimizer.save_checkpoint(tmp_path / f"ck{number}", extra=number)
        run.optimizer.wait_checkpoint()
        run.train(3)
    for number in (2, 3):
        assert_holds(tmp_path / f"ck{number}", states[number], extra=number)
    for number in (0, 1):
        assert_refused(tmp_path / f"ck{number}", "checkpoints_kept")


def test_one_folder_may_be_saved_to_again_and_again(tmp_path: Path, paths: list[Path]) -> None:
    with Run(**PLACES["half"](paths)) as run:
        for number in range(5):
            run.train(2)
            state = run.state()
            run.optimizer.save_checkpoint(tmp_path / "ck", extra=number)
            run.train(1)
        run.optimizer.wait_checkpoint()
        live = run.optimizer.metrics()["path/0/live_bytes"]
        (store,) = paths[0].iterdir()
        assert (store / "tiles").stat().st_size < 5 * live + (1 << 20), "old versions are not reused"
    assert len(list((tmp_path / "ck").iterdir())) == 3
    assert_holds(tmp_path / "ck", state, extra=4)


def test_nothing_is_left_on_the_paths_but_what_checkpoints_need(tmp_path: Path, paths: list[Path]) -> None:
    with Run(**PLACES["two paths"](paths), checkpoints_kept=0) as run:
        run.train(2)
        run.save(tmp_path / "copy", copy=True)
    assert not list(paths[0].iterdir())
    assert_holds(tmp_path / "copy", None)
    (tmp_path / "copy").rename(tmp_path / "moved")
    assert_holds(tmp_path / "moved", None)


def test_resuming_takes_the_checkpoint_over_and_releases_it_in_its_turn(tmp_path: Path, paths: list[Path]) -> None:
    with Run(**PLACES["streamed"](paths)) as run:
        run.train(2)
        run.save(tmp_path / "one")
    (first,) = find_stores(str(paths[0]))
    with Run(**PLACES["streamed"](paths)) as run:
        run.optimizer.load_checkpoint(tmp_path / "one")
        run.train(1)
        assert first.path in [store.path for store in find_stores(str(paths[0]))]
        run.save(tmp_path / "two")
        (own,) = find_stores(str(paths[0]))  # it has become this session's
        assert own.path == first.path
        assert [pin.folder for pin in own.pins] == [str(tmp_path / "two")]
        state = run.state()
    assert_refused(tmp_path / "one", "two took its place")
    assert_holds(tmp_path / "two", state)


def moved_bytes(run: Run) -> dict[str, int]:
    """Return the bytes that lanes have moved in the last step and since."""
    found: dict[str, int] = {}
    for interval in run.optimizer.timeline():
        found[interval.lane] = found.get(interval.lane, 0) + interval.nbytes
    return found


@pytest.mark.parametrize(
    ("place", "dtype", "more"),
    [
        ("streamed", torch.float32, {}),
        ("two paths", torch.bfloat16, {"io_backend": "threads"}),
        ("half", torch.bfloat16, {"path_lock": "on", "checksum": False}),
    ],
)
def test_resuming_copies_nothing_and_goes_on_in_the_same_stores(
    tmp_path: Path, paths: list[Path], place: str, more: dict[str, Any], dtype: torch.dtype
) -> None:
    used = PLACES[place](paths)["paths"]
    settings = {**PLACES[place](paths), "paths": [{"path": path, "share": 1} for path in used], **more}
    with Run(dtype, **settings) as run:
        run.train(3)
        run.optimizer.save_checkpoint(tmp_path / "one")
        run.train(2)
        run.optimizer.wait_checkpoint()
        at_end = run.state()
        step_bytes = sum(nbytes for lane, nbytes in moved_bytes(run).items() if lane.startswith("write"))
    stores = {store.path for path in used for store in find_stores(str(path))}
    for life in range(3):  # the stores do not grow from life to life
        with Run(dtype, seed=7 + life, **settings) as other:
            other.optimizer.load_checkpoint(tmp_path / "one")
            assert not [lane for lane in moved_bytes(other) if lane.startswith(("write", "save", "copy"))]
            assert {store.path for path in used for store in find_stores(str(path))} == stores
            other.step = 3
            other.train(2)
            assert same(other.state(), at_end)
            written = sum(nbytes for lane, nbytes in moved_bytes(other).items() if lane.startswith("write"))
            assert written <= 1.5 * step_bytes
            plan = other.optimizer.engine.plan
        found = sum((Path(store) / "tiles").stat().st_size for store in stores)
        assert found <= plan.storage_bytes + plan.checkpoint_bytes


@pytest.mark.parametrize("io_backend", ["auto", "asyncio"])
def test_a_resume_elsewhere_reads_the_checkpoint_where_it_lies_until_it_saves(
    tmp_path: Path, paths: list[Path], io_backend: str
) -> None:
    with Run(**PLACES["streamed"](paths)) as run:
        run.train(3)
        at_save = run.state()
        run.optimizer.save_checkpoint(tmp_path / "one")
        run.train(2)
        run.optimizer.wait_checkpoint()
        at_end = run.state()
    (first,) = find_stores(str(paths[0]))
    with Run(seed=1, host_memory=0, paths=paths[1:2], io_backend=io_backend) as other:
        other.optimizer.load_checkpoint(tmp_path / "one")
        assert not [lane for lane in moved_bytes(other) if lane.startswith(("write", "save", "copy"))]
        assert same(other.state(), at_save)
        (own,) = find_stores(str(paths[1]))
        other.save(tmp_path / "two")  # nothing has been updated: all of it is copied now
        assert not find_stores(str(paths[0])), "the checkpoint before was released, and its store not deleted"
        other.step = 3
        other.train(2)
        assert same(other.state(), at_end)
    assert not Path(first.path).exists()
    assert [store.path for store in find_stores(str(paths[1]))] == [own.path]
    assert_holds(tmp_path / "two", at_save)


def test_older_checkpoints_in_a_store_that_is_taken_over_are_kept_and_released_in_turn(
    tmp_path: Path, paths: list[Path]
) -> None:
    settings = {**PLACES["streamed"](paths), "checkpoints_kept": 3}
    states = []
    with Run(**settings) as run:
        for number in range(3):
            run.train(2)
            states.append(run.state())
            run.optimizer.save_checkpoint(tmp_path / str(number))
        run.optimizer.wait_checkpoint()
    with Run(seed=1, **settings) as run:
        run.optimizer.load_checkpoint(tmp_path / "1")  # not the newest: that one is nobody's to release
        run.step = 4
        for number in (3, 4, 5):
            run.train(2)
            if number == 3:
                assert same(run.state(), states[2])
            run.optimizer.save_checkpoint(tmp_path / str(number))
        run.optimizer.wait_checkpoint()
        run.train(2)
    for number in (0, 1):
        assert_refused(tmp_path / str(number), "took its place")
    for number in (2, 3):
        assert_holds(tmp_path / str(number), states[2])


def test_two_resumes_of_one_checkpoint_do_not_disturb_each_other(tmp_path: Path, paths: list[Path]) -> None:
    with Run(**PLACES["streamed"](paths)) as run:
        run.train(2)
        run.save(tmp_path / "ck")
        with Run(**PLACES["streamed"](paths)) as left, Run(**PLACES["half"](paths)) as right:
            for other in (left, right):
                other.optimizer.load_checkpoint(tmp_path / "ck")
                other.step = 2
                other.train(2)
                other.save(tmp_path / f"after-{id(other)}")
            run.train(2)
            assert same(left.state(), run.state())
            assert same(right.state(), run.state())
        assert_holds(tmp_path / "ck", None)  # neither has released what the first one still keeps


def test_a_checkpoint_that_is_being_read_is_not_released(tmp_path: Path, paths: list[Path]) -> None:
    with Run(**PLACES["streamed"](paths)) as run:
        run.train(2)
        run.save(tmp_path / "one")
        with Checkpoint(tmp_path / "one") as reading:
            run.train(2)
            run.optimizer.save_checkpoint(tmp_path / "two")
            run.train(2)
            run.optimizer.wait_checkpoint()
            assert not [problem for _, _, problem in reading.verify() if problem]
        run.save(tmp_path / "three")
    for name in ("one", "two"):
        with pytest.raises(offload.CheckpointError, match="three took its place"):
            Checkpoint(tmp_path / name)


def test_callback_and_waiting(tmp_path: Path, paths: list[Path]) -> None:
    said: list[BaseException | None] = []
    heard = threading.Event()

    def on_done(error: BaseException | None) -> None:
        said.append(error)
        heard.set()

    with Run(**PLACES["streamed"](paths)) as run:
        run.optimizer.wait_checkpoint()  # there is none: nothing to wait for
        run.train(1)
        run.optimizer.save_checkpoint(tmp_path / "ck", on_done=on_done)
        assert heard.wait(60)
        run.optimizer.wait_checkpoint(timeout_s=60)
    assert said == [None]


def test_a_load_waits_for_the_save_that_is_under_way(
    tmp_path: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waiting = threading.Event()
    run_job, wait_for_pending = CommitJob.run, Saves.wait_for_pending

    def run_late(job: CommitJob) -> None:
        is_waiting.wait(60)
        run_job(job)

    def wait(saves: Saves) -> None:
        is_waiting.set()
        wait_for_pending(saves)

    with Run(**PLACES["half"](paths)) as run:
        for number in range(3):
            run.train()
            with monkeypatch.context() as patch:
                patch.setattr(CommitJob, "run", run_late)
                run.optimizer.save_checkpoint(tmp_path / "ck", extra=number)
                patch.setattr(Saves, "wait_for_pending", wait)
                assert run.optimizer.load_checkpoint(tmp_path / "ck") == number
            is_waiting.clear()


def test_without_room_the_checkpoint_is_refused_and_training_goes_on(tmp_path: Path, paths: list[Path]) -> None:
    state_bytes = 12 * sum(SIZES)
    tight = {"host_memory": 0, "staging_memory": 3 * 12 * 1024, "paths": [{"path": paths[0]}]}
    with Run(**tight) as run:
        run.train(4)
        expected = run.state()
    tight["paths"][0]["max_bytes"] = int(2.6 * state_bytes)
    with Run(**tight) as run:
        run.train(2)
        with pytest.raises(offload.CheckpointError, match="no room for a checkpoint"):
            run.optimizer.save_checkpoint(tmp_path / "ck")
        run.train(2)
        assert same(run.state(), expected)
    assert not list(paths[0].iterdir())


def test_where_others_have_taken_what_was_planned_the_error_says_so(
    tmp_path: Path, mounted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state_bytes = 12 * sum(SIZES)
    small = mounted("tmpfs", f"size={2 * state_bytes}")
    # Free when it was planned; another rank has taken it since.
    monkeypatch.setattr("offload.session.setup.free_bytes", lambda _: [8 * state_bytes])
    with Run(host_memory=0, paths=[small]) as run:
        run.train()
        with pytest.raises(offload.CheckpointError, match="steps beside it need slots that cannot be made on them"):
            run.optimizer.save_checkpoint(tmp_path / "ck")
        assert "room that steps may need is not there" in caplog.text


def test_room_for_the_checkpoints_that_were_asked_for_is_planned(tmp_path: Path, paths: list[Path]) -> None:
    state_bytes = 12 * sum(SIZES)
    tight = {"host_memory": 0, "paths": [{"path": paths[0], "max_bytes": int(5 * state_bytes)}]}
    with pytest.raises(offload.InfeasiblePlanError, match="1 checkpoint kept and one being written"):
        Run(**tight, checkpoints_kept=1)
    assert not list(paths[0].iterdir())
    tight["paths"][0]["max_bytes"] = int(9 * state_bytes)
    for _ in range(2):  # the second finds the first one's store there
        with Run(**tight, checkpoints_kept=1) as run:
            assert "1 checkpoint kept and one being written" in str(run.optimizer.plan)
            if (tmp_path / "ck").exists():
                run.optimizer.load_checkpoint(tmp_path / "ck")
            for _ in range(4):
                run.train(2)
                run.optimizer.save_checkpoint(tmp_path / "ck")
            run.optimizer.wait_checkpoint()


def test_a_checkpoint_needs_no_write_for_what_lies_on_storage(tmp_path: Path, paths: list[Path]) -> None:
    """One staging slot: what it holds is flushed; all else is where it was."""
    config = {"host_memory": 0, "staging_memory": 12 * 1024, "paths": paths[:1]}
    with Run(**config) as run:
        run.train(2)
        written = run.optimizer.metrics()["path/0/write_bytes"]
        run.save(tmp_path / "ck")
        timeline = run.optimizer.timeline()
        extra = sum(item.nbytes for item in timeline if item.lane.startswith(("write", "save"))) - written
        assert extra <= 12 * 1024
        run.save(tmp_path / "again")  # nothing has changed
        assert sum(i.nbytes for i in run.optimizer.timeline()) == sum(i.nbytes for i in timeline)


@pytest.mark.parametrize("host_memory", [0, "1GiB"])
def test_state_that_has_not_changed_is_not_written_twice(tmp_path: Path, paths: list[Path], host_memory: Any) -> None:
    with Run(torch.float32, host_memory=host_memory, paths=paths[:1], checkpoints_kept=2) as run:
        run.train(2)
        run.save(tmp_path / "one")
        before = sum(item.nbytes for item in run.optimizer.timeline())
        run.save(tmp_path / "two")
        assert sum(item.nbytes for item in run.optimizer.timeline()) == before
        state = run.state()
    assert_holds(tmp_path / "two", state, dtype=torch.float32)


@pytest.mark.parametrize("host_memory", [0, "1GiB"])
@pytest.mark.parametrize("loads", [False, True], ids=["after a save", "after a load"])
def test_fp32_weights_written_past_version_counters_are_saved_as_they_are(
    tmp_path: Path, paths: list[Path], host_memory: Any, loads: bool
) -> None:
    config: dict[str, Any] = {"host_memory": host_memory, "paths": paths[:1], "checkpoints_kept": 3}
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Run(torch.float32, **config))
        run.train(2)
        run.save(tmp_path / "one")
        states = {"one": run.state()}
        if loads:
            run.optimizer.close()
            run = stack.enter_context(Run(torch.float32, seed=1, **config))
            run.optimizer.load_checkpoint(tmp_path / "one")
        run.parameters[0].data.mul_(0.5)  # averaged weights swapped in, a mask, ...
        run.parameters[-1].detach().numpy()[:] = 7
        run.save(tmp_path / "two")
        states["two"] = run.state()
        before = sum(item.nbytes for item in run.optimizer.timeline())
        run.save(tmp_path / "three")  # nothing has changed
        states["three"] = states["two"]
        assert sum(item.nbytes for item in run.optimizer.timeline()) == before
    assert not same(states["one"], states["two"])
    for name, state in states.items():
        assert_holds(tmp_path / name, state, dtype=torch.float32)


def double_moments(run: Run) -> None:
    state = deepcopy(run.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"] *= 2
    run.optimizer.load_state_dict(state)


def go_back(run: Run) -> None:
    run.optimizer.load_checkpoint(run.optimizer.engine.checkpoints.kept[-1])


@pytest.mark.parametrize("between", [None, double_moments, go_back, Run.train])
@pytest.mark.parametrize("state_format", ["exact", "compact16", "compact8"])
def test_updates_make_checksums_of_what_stays_in_memory_where_a_save_is_expected(
    tmp_path: Path,
    paths: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    state_format: str,
    between: Callable[[Run], None] | None,
) -> None:
    """And whatever changes that state in between has its checksums made by the save."""
    known: list[bool] = []
    plain = Seals.checksum_for_save

    def saving(seals: Seals, operation: SaveTile) -> int | None:
        checksum = plain(seals, operation)
        known.append(checksum is not None)
        return checksum

    monkeypatch.setattr(Seals, "checksum_for_save", saving)
    with Run(**PLACES["half"](paths), subgroup_numel=4096, state_format=state_format) as run:
        for number in range(4):
            run.train(2)
            if number == 3 and between is not None:
                between(run)
            known.clear()
            run.save(tmp_path / "ck")
            assert known
            if number < 2 or (number == 3 and between in (double_moments, go_back)):
                assert not any(known)
            elif number == 2 or between is None:
                assert any(known)  # not of subgroups whose gradients that step had not
        at_save = run.state()
    with Checkpoint(tmp_path / "ck") as reading:
        assert not [problem for _, _, problem in reading.verify() if problem]
    assert_holds(tmp_path / "ck", at_save, subgroup_numel=4096, state_format=state_format)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, paths: list[Path]) -> None:
    (tmp_path / "file").write_text("hello")
    with Run(**PLACES["streamed"](paths)) as run:
        run.train(1)
        for folder in ("file", "file/below"):
            with pytest.raises(offload.CheckpointError, match="file"):
                run.optimizer.save_checkpoint(tmp_path / folder)
        run.train(1)
        run.save(tmp_path / "good" / "deep")


def test_a_memory_format_that_differs_is_refused(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3, 4, 5))
    with offload.AdamW([weight]) as optimizer:
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
    other = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    with offload.AdamW([other]) as optimizer, pytest.raises(offload.CheckpointError, match="strides"):
        optimizer.load_checkpoint(tmp_path / "ck")


@pytest.mark.parametrize("number", [np.float32(0.125), np.array(0.125)], ids=lambda number: type(number).__name__)
def test_numbers_of_numpy_are_taken_as_torch_takes_them(tmp_path: Path, number: Any) -> None:
    def make(number: Any) -> tuple[torch.nn.Parameter, offload.AdamW]:
        parameter = torch.nn.Parameter(torch.ones(300))
        settings = {"lr": number, "betas": (number, number), "eps": number, "weight_decay": number}
        optimizer = offload.AdamW([parameter], **settings)
        optimizer.param_groups[0]["own"] = [number, (number, True)]
        return parameter, optimizer

    (mine, optimizer), (twin, plain) = make(number), make(0.125)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=number, betas=(0.5, 0.5), eps=number)
    with optimizer, plain:
        for parameter, each in ((mine, optimizer), (twin, plain)):
            parameter.grad = torch.ones(300)
            each.clip_grad_norm_(number)
            each.step()
        assert torch.equal(mine, twin)
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
        plain.load_checkpoint(tmp_path / "ck")
        group = plain.param_groups[0]
        assert (group["lr"], group["betas"], group["own"]) == (0.125, (0.125, 0.125), [0.125, [0.125, True]])
        plain.load_state_dict(optimizer.state_dict())


def test_what_is_no_number() -> None:
    for number in (np.float32("nan"), np.array([0.1, 0.2]), np.array("0.1"), "0.1", 1j, np.complex64(1), 10**400):
        for name in ("lr", "eps", "weight_decay"):
            with pytest.raises(offload.ConfigError, match=name):
                offload.AdamW([torch.nn.Parameter(torch.ones(3))], **{name: number})


def test_a_checkpoint_that_a_save_ends_is_told_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"host_memory": 0, "paths": [tmp_path]}

    def save(run: Run, *names: str) -> list[str]:
        caplog.clear()
        for name in names:
            run.train()
            run.save(tmp_path / name)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    with Run(**config) as run:
        assert not save(run, "base", "base")
    with Run(**config) as run:
        run.optimizer.load_checkpoint(tmp_path / "base")
        (told,) = save(run, "other", "third")
        assert told.startswith(
            f"{tmp_path}/base, from which this session goes on, is released once {tmp_path}/other is"
        )
        assert not save(run, "step-1", "step-2")
    with Run(**config) as run:
        run.optimizer.load_checkpoint(tmp_path / "step-2")
        assert not save(run, "step-3")  # folders in turn
    with Run(**config) as run:
        (told,) = save(run, "step-3", "step-3")
        assert (
            told == f"{tmp_path}/step-3 holds a checkpoint of another session: it is replaced once this one is whole"
        )
    with Run(**config, checkpoints_kept=2) as run:
        run.optimizer.load_checkpoint(tmp_path / "step-3")
        assert not save(run, "fork")  # both are kept
    with Run(**config, checkpoints_kept=2) as run:
        run.optimizer.load_checkpoint(tmp_path / "step-3")
        assert not save(run, "fork", "step-3", "fork")  # "fork" is newer than what was loaded, of the same run


def test_two_sessions_that_save_to_one_folder_do_not_replace_each_others(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    runs = [Run(host_memory=0, paths=[tmp_path / name], checkpoints_kept=2) for name in ("one", "two")]
    with runs[0] as one, runs[1] as two:
        for name in ("ck", "ck", "other"):  # its own are replaced
            one.train()
            one.save(tmp_path / name)
        two.optimizer.load_checkpoint(tmp_path / "ck")
        two.train()
        two.save(tmp_path / "ck")
        expected = two.state()
        refusal = f"{tmp_path}/ck holds a checkpoint that another session has saved, or somebody has moved there"
        with pytest.raises(offload.CheckpointError, match=refusal):
            one.save(tmp_path / "ck")
        one.save(tmp_path / "other")
    with Run(host_memory=0, paths=[tmp_path / "two"]) as run:
        run.optimizer.load_checkpoint(tmp_path / "ck")
        assert same(run.state(), expected)


def test_a_sessions_own_checkpoints_may_change_places(tmp_path: Path) -> None:
    with Run(host_memory=0, paths=[tmp_path], checkpoints_kept=2) as run:
        for name in ("last", "best"):
            run.train()
            run.save(tmp_path / name)
        (tmp_path / "last").rename(tmp_path / "moved")
        (tmp_path / "best").rename(tmp_path / "last")
        run.train()
        run.save(tmp_path / "last")
        expected = run.state()
    assert_holds(tmp_path / "last", expected)


SAVED = """
import sys, torch, offload
weight = torch.nn.Parameter(torch.ones(64, 64))
optimizer = offload.AdamW([("weight", weight)], offload={"host_memory": 0, "paths": [sys.argv[1]]})
weight.grad = torch.ones(64, 64)
optimizer.step()
optimizer.save_checkpoint(sys.argv[2])
optimizer.wait_checkpoint()
print("saved", flush=True)
sys.stdin.read()
"""


def test_a_checkpoint_of_a_process_that_trains_is_not_replaced(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVED, str(tmp_path), str(tmp_path / "ck")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        with Run(host_memory=0, paths=[tmp_path]) as run:
            run.train()
            refusal = f"ck holds a checkpoint that process {other.pid} has saved, or has gone on from, and which is"
            with pytest.raises(offload.CheckpointError, match=refusal):
                run.save(tmp_path / "ck")
            other.kill()
            other.wait()
            run.save(tmp_path / "ck")
