"""`OffloadConfig.mirror`: committed checkpoints are copied elsewhere behind training, and resumed from there."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faulty import Fault, FaultKind, FaultyTier
from limited import limited
from s3_server import BUCKET, S3Server
from sharded import spawn

import offload
from offload.checkpoint import mirror as mirrors
from offload.checkpoint.contents import is_checkpoint
from offload.checkpoint.reader import Checkpoint
from offload.rules import GroupScalars
from offload.tiers import open_tier
from offload.tiers.buckets import Bucket
from offload.tiers.directories import DirectoryFolder

SHAPES = ((60, 90), (1,), (80, 100))


class Run:
    """Parameters and an optimizer whose gradients depend on the step alone."""

    def __init__(self, kind: Any = offload.AdamW, **config: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in SHAPES]
        settings = offload.OffloadConfig(**{"host_memory": 0, "subgroup_numel": 1024, **config})
        named = [(f"layer{number}.weight", p) for number, p in enumerate(self.parameters)]
        self.optimizer = kind(named, lr=1e-2, offload=settings)
        self.step = 0

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 + self.step)
            for parameter in self.parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            self.optimizer.step()
            self.step += 1

    def save(self, folder: Path | str) -> list[torch.Tensor]:
        """Save, and return the state that was saved."""
        state = self.state()
        self.optimizer.save_checkpoint(folder, extra=self.step)
        return state

    def state(self) -> list[torch.Tensor]:
        found = [parameter.detach().clone() for parameter in self.parameters]
        for number, parameter in enumerate(self.parameters):
            found += [tensor.clone() for tensor in self.optimizer.state_for(parameter).values()]
            found.append(torch.tensor(self.optimizer.engine.step_count(number)))
        return found

    @property
    def mirrored_bytes(self) -> float:
        return self.optimizer.metrics()["mirrored_bytes"]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.optimizer.close()


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def assert_holds(folder: Path | str, expected: list[torch.Tensor], **config: Any) -> None:
    """A checkpoint with nothing beside it is of that state, and is gone on from."""
    with Run(paths=(), host_memory=None, **config) as run:
        run.step = run.optimizer.load_checkpoint(folder)
        assert same(run.state(), expected)
        run.train()


def whole_bytes(folder: Path | str) -> int:
    with Checkpoint(folder) as checkpoint:
        return sum(sum(manifest.tile_bytes.values()) for manifest in checkpoint.manifests)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Any]:
    """A path and a mirror, as settings."""
    for name in ("path", "mirror"):
        (tmp_path / name).mkdir()
    return {"paths": [tmp_path / "path"], "mirror": str(tmp_path / "mirror")}


class Gate:
    """Holds the mirror until `open`: before it writes a tile, or, where it is `early`, before it reads anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mirror: Path, *, early: bool = False) -> None:
        self.reached, self.is_open = threading.Event(), threading.Event()
        plain_prepare = DirectoryFolder.prepare

        def prepare(folder: DirectoryFolder) -> None:
            if early and folder.path.startswith(str(mirror)):
                self._hold()
            plain_prepare(folder)

        def opening(*arguments: Any, **settings: Any) -> Any:
            self._hold()
            return open_tier(*arguments, **settings)

        monkeypatch.setattr(DirectoryFolder, "prepare", prepare)
        monkeypatch.setattr(mirrors, "open_tier", opening)

    def _hold(self) -> None:
        self.reached.set()
        assert self.is_open.wait(120)

    def open(self) -> None:
        self.is_open.set()


@pytest.fixture
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gate:
    return Gate(monkeypatch, tmp_path / "mirror", early=getattr(request, "param", False))


# What a mirror has


@pytest.mark.parametrize("state_format", ["exact", "compact8"])
def test_a_machine_that_lost_its_paths_goes_on_from_the_mirror(
    tmp_path: Path, places: dict[str, Any], state_format: str
) -> None:
    settings = {"state_format": state_format, "subgroup_numel": 4096}
    with Run(**settings, **places | {"host_memory": 40_000}) as run:
        run.train(3)
        saved = run.save(tmp_path / "ck")
        run.train(2)
        run.optimizer.wait_checkpoint()
        run.optimizer.wait_mirror()
        assert run.mirrored_bytes == whole_bytes(tmp_path / "ck")
        assert {entry.name.partition("-")[0] for entry in (tmp_path / "mirror" / "ck").iterdir()} == {
            "COMMIT",
            "manifest",
            "extra",
            "offload",
        }
        after = run.state()
    for name in ("path", "ck"):
        shutil.rmtree(tmp_path / name)
    shutil.move(tmp_path / "mirror" / "ck", tmp_path / "moved")
    with Run(**settings, paths=(), host_memory=None) as run:
        run.step = run.optimizer.load_checkpoint(tmp_path / "moved")
        assert same(run.state(), saved)
        run.train(2)
        assert same(run.state(), after)


def test_a_bucket_mirrors_what_lies_on_a_drive(s3: S3Server, tmp_path: Path, places: dict[str, Any]) -> None:
    mirror = f"s3://{BUCKET}/mirror-{uuid.uuid4()}"
    with Run(**places | {"mirror": mirror}) as run:
        for _ in range(2):
            run.train()
            saved = run.save(tmp_path / "ck")
            run.optimizer.wait_checkpoint()
            run.optimizer.wait_mirror()
    shutil.rmtree(tmp_path / "path")
    keys = s3.keys(mirror.removeprefix(f"s3://{BUCKET}/"))
    assert all("/ck/" in key and "mirror-" not in key.rpartition("/")[2] for key in keys)
    assert len(Bucket(f"{mirror}/ck").stores()) == 1, "the copy that was replaced goes"
    assert_holds(f"{mirror}/ck", saved)


def test_state_on_a_bucket_is_mirrored_on_a_drive(s3: S3Server, tmp_path: Path, places: dict[str, Any]) -> None:
    with Run(**places | {"paths": [f"s3://{BUCKET}/path-{uuid.uuid4()}"]}) as run:
        run.train()
        saved = run.save(tmp_path / "ck")
        run.train(3)
        run.optimizer.wait_checkpoint()
        run.optimizer.wait_mirror()
    assert_holds(tmp_path / "mirror" / "ck", saved)


def test_only_what_is_not_mirrored_is_mirrored(tmp_path: Path, places: dict[str, Any]) -> None:
    with Run(**places) as run:
        run.train()
        run.optimizer.save_checkpoint(tmp_path / "copy", copy=True)
        run.optimizer.engine.checkpoints.save(offload.SaveRequest(tmp_path / "own", mirrored=False))
        saved = run.save(tmp_path / "ck")
        run.optimizer.wait_checkpoint()
        run.optimizer.wait_mirror()
        assert sorted(entry.name for entry in (tmp_path / "mirror").iterdir()) == ["ck"]
    for folder in (tmp_path / "ck", tmp_path / "mirror" / "ck", tmp_path / "copy"):
        with Run(**places) as run:
            run.optimizer.load_checkpoint(folder)
            run.optimizer.wait_mirror()
            assert run.mirrored_bytes == 0
            assert same(run.state(), saved)


def test_another_runs_copy_is_not_replaced_as_its_folder_has_the_name(tmp_path: Path, places: dict[str, Any]) -> None:
    def train(folder: str, loaded: Path | None = None) -> list[torch.Tensor]:
        with Run(**places) as run:
            if loaded is not None:
                run.optimizer.load_checkpoint(loaded)
            run.train()
            saved = run.save(tmp_path / folder)
            run.optimizer.wait_checkpoint()
            run.optimizer.wait_mirror()
            return saved

    first = train("one/last")
    refusal = f"{tmp_path}/mirror/last holds a checkpoint of another run, of step 1, saved on .*: give this run"
    with pytest.raises(offload.CheckpointError, match=refusal):
        train("two/last")
    assert_holds(tmp_path / "mirror" / "last", first)
    train("two/other")
    gone_on = train("two/last", tmp_path / "one" / "last")  # it is the first run that goes on elsewhere
    assert_holds(tmp_path / "mirror" / "last", gone_on)
    moved = train("one/last", tmp_path / "mirror" / "last")
    assert_holds(tmp_path / "mirror" / "last", moved)
    anew = train("one/last")  # in the run's own folder, as one that loads a state dict goes on
    assert_holds(tmp_path / "mirror" / "last", anew)


# Behind training


@pytest.mark.parametrize("gate", [False, True], indirect=True, ids=["late", "early"])
@pytest.mark.parametrize("one_folder", [False, True], ids=["folders", "one folder"])
def test_of_several_saves_the_newest_is_mirrored_next(
    tmp_path: Path, places: dict[str, Any], gate: Gate, one_folder: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="offload")
    mirrored: dict[str, list[torch.Tensor]] = {}
    with Run(**places, checkpoints_kept=1) as run:
        for number in range(5):
            run.train()
            name = "ck" if one_folder else f"ck{number}"
            saved = run.save(tmp_path / name)
            run.optimizer.wait_checkpoint()
            if number == 0:
                assert gate.reached.wait(60)
            if number in (0, 4):
                mirrored[name] = saved
        assert sum(is_checkpoint(tmp_path / f"ck{number}") for number in range(5)) == 2 * (not one_folder)
        with pytest.raises(TimeoutError):
            run.optimizer.wait_mirror(0.0)
        gate.open()
        run.optimizer.wait_mirror()
        assert run.mirrored_bytes == 2 * whole_bytes(tmp_path / name)
    assert sorted(entry.name for entry in (tmp_path / "mirror").iterdir()) == sorted(mirrored)
    for name, expected in mirrored.items():
        assert_holds(tmp_path / "mirror" / name, expected)
    assert caplog.text.count("is not mirrored: there is a newer one") == 3


def test_the_plan_has_room_for_what_is_mirrored(tmp_path: Path, places: dict[str, Any], gate: Gate) -> None:
    with Run(**places | {"mirror": None}, checkpoints_kept=1) as run:
        without = run.optimizer.engine.plan
    with Run(**places, checkpoints_kept=1) as run:
        needed, text = run.optimizer.engine.plan.needed_with_checkpoints, str(run.optimizer.plan)
        assert run.optimizer.engine.plan.checkpoint_bytes * 2 == without.checkpoint_bytes * 3
    assert "1 checkpoint kept, one being mirrored and one being written" in text
    paths = [{"path": tmp_path / "path", "max_bytes": needed}]
    with pytest.raises(offload.InfeasiblePlanError, match="one being mirrored"):
        Run(**places | {"paths": [{"path": tmp_path / "path", "max_bytes": needed - 4096}]}, checkpoints_kept=1)
    with Run(**places | {"paths": paths}, checkpoints_kept=1) as run:
        for number in range(6):
            run.train(2)
            saved = run.save(tmp_path / f"ck{number}")
            run.optimizer.wait_checkpoint()
            if number == 0:
                assert gate.reached.wait(60)
                first = saved
        gate.open()
        run.optimizer.wait_mirror()
        run.train()
        run.save(tmp_path / "last")
        run.optimizer.wait_checkpoint()
        assert not is_checkpoint(tmp_path / "ck0")
    assert_holds(tmp_path / "mirror" / "ck0", first)
    assert_holds(tmp_path / "mirror" / "ck5", saved)


def test_what_is_being_mirrored_is_not_released(tmp_path: Path, places: dict[str, Any], gate: Gate) -> None:
    with Run(**places, checkpoints_kept=2) as run:
        for name in ("first", "second"):
            run.train()
            saved = run.save(tmp_path / name)
            run.optimizer.wait_checkpoint()
            assert gate.reached.wait(60)
        with pytest.raises(offload.CheckpointError, match="could not be released"):
            run.optimizer.release_checkpoint(tmp_path / "first")
        run.optimizer.release_checkpoint(tmp_path / "second")
        gate.open()
        with pytest.raises(offload.CheckpointError, match=r"second was not mirrored in .*: .* is missing"):
            run.optimizer.wait_mirror()
        run.optimizer.release_checkpoint(tmp_path / "first")
        run.save(tmp_path / "third")
        run.optimizer.wait_checkpoint()
        run.optimizer.wait_mirror()
    assert_holds(tmp_path / "mirror" / "third", saved)


# What goes wrong


def killed_run(folder: Path, batches: int) -> None:
    mirrors.BATCH_BYTES = 1
    plain, calls = Checkpoint.copy, itertools.count()

    def copy(checkpoint: Checkpoint, *arguments: Any) -> None:
        if next(calls) == batches:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(checkpoint, *arguments)

    Checkpoint.copy = copy  # type: ignore[method-assign]
    run = Run(paths=[folder / "path"], mirror=str(folder / "mirror"))
    run.train(2)
    torch.save(run.save(folder / "ck"), folder / "saved")
    run.optimizer.wait_checkpoint()
    run.optimizer.wait_mirror()


@pytest.mark.slow
@pytest.mark.parametrize("batches", [0, 7])
def test_a_session_goes_on_with_the_mirror_of_one_that_was_killed(
    tmp_path: Path, places: dict[str, Any], batches: int
) -> None:
    child = os.fork()
    if not child:
        try:
            killed_run(tmp_path, batches)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not is_checkpoint(tmp_path / "mirror" / "ck")
    with Run(**places) as run:
        run.step = run.optimizer.load_checkpoint(tmp_path / "ck")
        run.optimizer.wait_mirror()
        assert run.mirrored_bytes > 0
        assert (run.mirrored_bytes < whole_bytes(tmp_path / "ck")) == (batches > 0)
        run.train()
    shutil.rmtree(tmp_path / "path")
    assert_holds(tmp_path / "mirror" / "ck", torch.load(tmp_path / "saved"))


@pytest.mark.parametrize("way", ["limit", "Ctrl-C"])
def test_a_close_gives_up_a_mirror_that_takes_long(
    tmp_path: Path,
    places: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mirrors, "BATCH_BYTES", 1)
    plain, reached, go, calls = Checkpoint.copy, threading.Event(), threading.Event(), itertools.count()

    def copy(checkpoint: Checkpoint, *arguments: Any) -> None:
        if next(calls) == 3:
            reached.set()
            assert go.wait(120)
        plain(checkpoint, *arguments)

    monkeypatch.setattr(Checkpoint, "copy", copy)
    run = Run(limited(offload.AdamW, close_s=0.05, settle_s=0.05), **places)
    run.train()
    saved = run.save(tmp_path / "ck")
    run.optimizer.wait_checkpoint()
    assert reached.wait(60)
    if way == "limit":
        run.optimizer.close()
    else:
        with pytest.raises(KeyboardInterrupt), run:
            raise KeyboardInterrupt
    assert f"{tmp_path / 'ck'} is not mirrored yet" in caplog.text
    go.set()
    for thread in threading.enumerate():
        if thread.name == "offload-mirror":
            thread.join(60)
    assert not is_checkpoint(tmp_path / "mirror" / "ck")
    with Run(**places) as run:
        run.optimizer.load_checkpoint(tmp_path / "ck")
        run.optimizer.wait_mirror()
        assert 0 < run.mirrored_bytes < whole_bytes(tmp_path / "ck")
    assert_holds(tmp_path / "mirror" / "ck", saved)


def test_a_close_waits_for_a_mirror_that_does_not(tmp_path: Path, places: dict[str, Any]) -> None:
    def work() -> list[torch.Tensor]:
        with Run(limited(offload.AdamW, close_s=600.0), **places) as run:
            run.train()
            return run.save(tmp_path / "ck")

    # On a thread of its own: a runner of tests may be handling an exception, with which a close waits for nobody.
    with ThreadPoolExecutor(1) as threads:
        saved = threads.submit(work).result()
    assert_holds(tmp_path / "mirror" / "ck", saved)


def test_a_full_mirror_is_told_and_the_next_checkpoint_is_tried(
    tmp_path: Path, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [[], [Fault("write", FaultKind.ERROR, 5, errno.ENOSPC)], [Fault("sync", FaultKind.ERROR)], []]

    def opening(name: str, store: uuid.UUID, queue: Any, **settings: Any) -> FaultyTier:
        return FaultyTier(open_tier(name, store, queue, **settings), queue, faults.pop(0))

    monkeypatch.setattr(mirrors, "open_tier", opening)
    folder = tmp_path / "mirror" / "ck"
    with Run(**places) as run:
        run.train()
        before = run.save(tmp_path / "ck")
        run.optimizer.wait_checkpoint()
        run.optimizer.wait_mirror()
        files = sorted(folder.rglob("*"))
        for said in ("ENOSPC", "sync failed"):
            run.train()
            run.save(tmp_path / "ck")
            run.optimizer.wait_checkpoint()
            with pytest.raises(offload.CheckpointError, match=f"ck was not mirrored in .*{said}") as caught:
                run.optimizer.wait_mirror()
            assert isinstance(caught.value.__cause__, offload.TierError)
            assert caplog.records[-1].getMessage().startswith(f"{tmp_path / 'ck'} was not mirrored")
            assert sorted(folder.rglob("*")) == files
            assert_holds(folder, before)
        run.train()
        saved = run.save(tmp_path / "ck")
        run.optimizer.wait_checkpoint()
        run.optimizer.wait_mirror()
    assert_holds(folder, saved)


def test_a_mirror_that_is_not_mounted_any_more_gets_nothing(
    tmp_path: Path, places: dict[str, Any], mounted: Callable[..., Path]
) -> None:
    """Until it is mounted again; links are followed, as to what a mount point shows."""
    device, below, mirror = mounted("tmpfs", "size=16m"), tmp_path / "mirror", tmp_path / "link"
    mirror.symlink_to(device)
    with Run(**places | {"mirror": str(mirror)}) as run:
        for shown, is_mirrored in ((device, True), (below, False), (tmp_path / "none", False), (device, True)):
            mirror.unlink()
            mirror.symlink_to(shown)
            run.train()
            saved = run.save(tmp_path / "ck")
            run.optimizer.wait_checkpoint()
            if is_mirrored:
                run.optimizer.wait_mirror()
            else:
                with pytest.raises(offload.CheckpointError, match="not there, or lies on another device than when"):
                    run.optimizer.wait_mirror()
            assert not os.listdir(below)
    assert_holds(device / "ck", saved)


def test_damage_is_found_before_it_is_mirrored(
    tmp_path: Path, places: dict[str, Any], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(**places) as run:
        run.train()
        run.save(tmp_path / "ck")
        run.optimizer.wait_checkpoint()
        assert gate.reached.wait(60)
        (tiles,) = (tmp_path / "path").rglob("tiles")
        size = tiles.stat().st_size
        tiles.write_bytes(b"\xff" * size)
        gate.open()
        with pytest.raises(offload.CheckpointError, match=r"layer\d.weight cannot be read from"):
            run.optimizer.wait_mirror()
    assert not is_checkpoint(tmp_path / "mirror" / "ck")


def test_a_mirror_that_protects_nothing_is_refused(tmp_path: Path, places: dict[str, Any]) -> None:
    path, mirror = places["paths"][0], places["mirror"]
    (path / "inside").mkdir()
    (tmp_path / "link").symlink_to(path)
    for wrong in (path, path / "inside", tmp_path / "link", f"file://{path}"):
        with pytest.raises(offload.ConfigError, match="name a place outside of"):
            offload.OffloadConfig(paths=[path], mirror=str(wrong))
    bucket = f"s3://{BUCKET}/run"
    with pytest.raises(offload.ConfigError, match="name a place outside of"):
        offload.OffloadConfig(paths=[bucket], mirror=f"{bucket}/mirror")
    assert offload.OffloadConfig(paths=[bucket], mirror=f"{bucket}-mirror").mirror == f"{bucket}-mirror"
    for settings in ({}, {"paths": [path], "checkpoints_kept": 0}):
        with pytest.raises(offload.ConfigError, match="give paths, and keep at least 1 checkpoint"):
            offload.OffloadConfig(mirror=mirror, **settings)
    for value in (3, "", ["a"]):
        with pytest.raises(offload.ConfigError, match="mirror"):
            offload.OffloadConfig(paths=[path], mirror=value)  # type: ignore[arg-type]
    with pytest.raises(offload.ConfigError, match="the directory does not exist"):
        Run(paths=[path], mirror=str(tmp_path / "missing"))
    with Run(**places) as run:
        run.train()
        for folder in (tmp_path / "mirror", tmp_path / "mirror" / "ck"):
            with pytest.raises(offload.ConfigError, match="save to a folder outside of"):
                run.optimizer.save_checkpoint(folder)


# Several ranks

SCALARS = GroupScalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
WHOLE = 10_000


class Shard:
    """One rank's run of a parameter, in an engine of its own."""

    def __init__(self, rank: int, ranks: int, **config: Any) -> None:
        self.rank, self.ranks = rank, ranks
        generator = torch.Generator().manual_seed(0)
        start, stop = rank * WHOLE // ranks, (rank + 1) * WHOLE // ranks
        self.weight = torch.randn(WHOLE, generator=generator).bfloat16()[start:stop].clone()
        self.gradient = torch.randn(WHOLE, generator=generator).bfloat16()[start:stop].clone()
        parameter = offload.Parameter("weight", stop - start, offload.DtypeCode.BFLOAT16, 0, start, WHOLE)
        self.engine = offload.Engine([parameter], offload.OffloadConfig(**{"subgroup_numel": 1024, **config}))
        self.engine.bind_weight(0, self.weight.data_ptr())
        self.engine.gradients.bind(0, self.gradient.data_ptr(), offload.DtypeCode.BFLOAT16)

    def state(self) -> list[torch.Tensor]:
        (found,) = self.engine.state.read([0])
        return [self.weight.clone(), *(tensor.clone() for tensor in found.values())]


class Ranks:
    """Two ranks in one process; what a rank of a process of its own does not do is the same."""

    def __init__(self, folder: Path) -> None:
        (folder / "mirror").mkdir()
        self.shards = []
        for rank in range(2):
            (folder / f"path{rank}").mkdir()
            settings = {"host_memory": 0, "paths": [folder / f"path{rank}"], "mirror": str(folder / "mirror")}
            self.shards.append(Shard(rank, 2, **settings))
        self.numbers = itertools.count()

    def save(self, folder: Path, order: Sequence[int] = (0, 1)) -> list[torch.Tensor]:
        """Take a step, and save with the ranks beginning in an order; return the state that was saved."""
        id = f"{next(self.numbers):032x}"
        for rank in self.shards:
            rank.engine.step([SCALARS])
        saved = [torch.cat(parts) for parts in zip(*(rank.state() for rank in self.shards), strict=True)]
        for number in order:
            self.shards[number].engine.checkpoints.save(offload.SaveRequest(folder, id=id, rank=number, ranks=2))
        for rank in self.shards:
            rank.engine.checkpoints.wait(120)
        return saved

    def wait_mirror(self) -> None:
        for rank in self.shards:
            rank.engine.checkpoints.wait_mirror(120)

    def close(self) -> None:
        for rank in self.shards:
            rank.engine.close()


@pytest.fixture
def two(tmp_path: Path) -> Any:
    made = Ranks(tmp_path)
    yield made
    made.close()


def assert_ranks_hold(folder: Path, expected: list[torch.Tensor]) -> None:
    other = Shard(0, 1)
    with Checkpoint(folder) as checkpoint:
        other.engine.checkpoints.load(checkpoint)
    assert same(other.state(), expected)
    other.engine.close()


@pytest.mark.parametrize("one_folder", [False, True], ids=["folders", "one folder"])
def test_ranks_mirror_the_same_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_folder: bool, two: Ranks
) -> None:
    # One rank is in it, or both are: the other one may learn of it by the next COMMIT alone.
    gate = Gate(monkeypatch, tmp_path / "mirror")
    saved: dict[int, list[torch.Tensor]] = {}
    for number in range(5):
        folder = tmp_path / ("ck" if one_folder else f"ck{number}")
        saved[number] = two.save(folder, order=(number % 2, 1 - number % 2))
        if number == 0:
            assert gate.reached.wait(60)
    gate.open()
    two.wait_mirror()
    if one_folder:
        assert_ranks_hold(tmp_path / "mirror" / "ck", saved[4])
        left = [entry.name for entry in (tmp_path / "mirror" / "ck").iterdir()]
        assert len([name for name in left if name.startswith("offload-")]) == 2
        assert not [name for name in left if name.startswith(("mirror-", "failed-"))]
    else:
        assert sorted(entry.name for entry in (tmp_path / "mirror").iterdir()) == ["ck0", "ck4"]
        for number in (0, 4):
            assert_ranks_hold(tmp_path / "mirror" / f"ck{number}", saved[number])


@pytest.mark.parametrize("one_folder", [False, True], ids=["folders", "one folder"])
def test_a_rank_that_has_not_looked_keeps_what_rank_0_mirrors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_folder: bool, two: Ranks
) -> None:
    gate, looks = Gate(monkeypatch, tmp_path / "mirror"), threading.Event()
    plain = mirrors.RankPart.has_begun

    def has_begun(part: mirrors.RankPart) -> bool:
        assert looks.wait(120)
        return plain(part)

    monkeypatch.setattr(mirrors.RankPart, "has_begun", has_begun)
    for number in range(3):
        saved = two.save(tmp_path / ("ck" if one_folder else f"ck{number}"))
        if number == 0:
            assert gate.reached.wait(60)
            first = saved
    looks.set()
    gate.open()
    two.wait_mirror()
    for rank in two.shards:
        with Checkpoint(tmp_path / ("ck" if one_folder else "ck2")) as checkpoint:
            own_bytes = sum(checkpoint.manifests[rank.rank].tile_bytes.values())
        assert rank.engine.metrics()["mirrored_bytes"] == 2 * own_bytes
    if not one_folder:
        assert_ranks_hold(tmp_path / "mirror" / "ck0", first)
    assert_ranks_hold(tmp_path / "mirror" / ("ck" if one_folder else "ck2"), saved)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("when", ["at once", "at the end"])
def test_a_rank_whose_mirror_fails_ends_that_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: Ranks, failing: int, when: str
) -> None:
    before = two.save(tmp_path / "ck")
    two.wait_mirror()
    files = sorted((tmp_path / "mirror").rglob("*"))
    plain_copy, plain_write = Checkpoint.copy, DirectoryFolder.write
    is_named = threading.Event()

    def copy(checkpoint: Checkpoint, *arguments: Any) -> None:
        if checkpoint.manifests[0].rank == failing:
            assert when == "at once" or is_named.wait(60)
            raise offload.CheckpointError("as if")
        plain_copy(checkpoint, *arguments)

    def write(folder: DirectoryFolder, name: str, content: bytes, **options: Any) -> None:
        plain_write(folder, name, content, **options)
        if folder.path.startswith(str(tmp_path / "mirror")) and name.startswith("manifest-"):
            is_named.set()

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "copy", copy)
        patch.setattr(DirectoryFolder, "write", write)
        two.save(tmp_path / "ck")
        for rank in two.shards:
            with pytest.raises(
                offload.CheckpointError, match="as if" if rank.rank == failing else "has (ended|failed)"
            ):
                rank.engine.checkpoints.wait_mirror(120)
    left = [file for file in sorted((tmp_path / "mirror").rglob("*")) if not file.name.startswith("failed-")]
    assert left == files
    assert_ranks_hold(tmp_path / "mirror" / "ck", before)
    saved = two.save(tmp_path / "ck")
    two.wait_mirror()
    assert_ranks_hold(tmp_path / "mirror" / "ck", saved)


def each_saves_its_own(folder: Path) -> None:
    rank = dist.get_rank()
    settings = {"host_memory": 0, "paths": [folder / "path"], "subgroup_numel": 1024, "threads": 1}
    config = offload.OffloadConfig(**settings, mirror=str(folder / "mirror"))

    def opened(config: offload.OffloadConfig | None) -> tuple[torch.nn.Parameter, Any]:
        weight = torch.nn.Parameter(torch.full((5000,), rank + 1.0).bfloat16())
        return weight, offload.AdamW([(f"weight-{rank}", weight)], lr=1e-2, offload=config)

    weight, optimizer = opened(config)
    for step in range(6):
        weight.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.step()
        optimizer.save_checkpoint(folder / "ck", extra=step)
    optimizer.wait_checkpoint()
    optimizer.wait_mirror()
    expected = [weight.detach().clone(), *(t.clone() for t in optimizer.state_for(weight).values())]
    optimizer.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / "path")
        shutil.rmtree(folder / "ck")
    dist.barrier()
    weight, optimizer = opened(None)
    assert optimizer.load_checkpoint(folder / "mirror" / "ck") == 5
    assert same([weight.detach(), *optimizer.state_for(weight).values()], expected)
    optimizer.close()


@pytest.mark.slow
def test_processes_mirror_what_they_save_together(tmp_path: Path) -> None:
    for name in ("path", "mirror"):
        (tmp_path / name).mkdir()
    spawn(2, tmp_path, each_saves_its_own)
