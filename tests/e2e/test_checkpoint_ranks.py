"""Checkpoints of several ranks: one commit for all, any number of ranks at load."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mirror import same
from sharded import on_ranks, spawn
from torch.distributed.fsdp import fully_shard

import offload
from offload import waits
from offload.checkpoint import commit
from offload.checkpoint.contents import is_checkpoint
from offload.checkpoint.marker import Mark, mark_of
from offload.checkpoint.reader import Checkpoint
from offload.limits import Limits
from offload.rules import GroupScalars
from offload.tiers.directories import DirectoryFolder

WHOLE = 10_000
SCALARS = GroupScalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


class Shard:
    """One rank's run of a parameter, in an engine of its own."""

    def __init__(self, start: int, stop: int, limits: Limits | None = None, **config: object) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(WHOLE, generator=generator).bfloat16()[start:stop].clone()
        gradient = torch.randn(WHOLE, generator=generator).bfloat16()[start:stop].clone()
        self.gradient = gradient
        parameter = offload.Parameter("weight", stop - start, offload.DtypeCode.BFLOAT16, 0, start, WHOLE)
        settings = offload.OffloadConfig(**{"subgroup_numel": 1024, **config})
        self.engine = offload.Engine([parameter], settings, limits=limits)
        self.engine.bind_weight(0, self.weight.data_ptr())
        self.engine.gradients.bind(0, gradient.data_ptr(), offload.DtypeCode.BFLOAT16)

    def step(self) -> None:
        self.engine.step([SCALARS])

    def state(self) -> list[torch.Tensor]:
        (found,) = self.engine.state.read([0])
        return [self.weight.clone(), *found.values()]


class Ranks(list[Shard]):
    """The shards of all ranks, in one process; they are closed at the end of a context."""

    def step(self, times: int = 1) -> None:
        for rank in self:
            for _ in range(times):
                rank.step()

    def save(self, folder: Path, *which: int, id: str = "a") -> None:
        """Begin the part of some ranks of a save to `folder`, or of all."""
        for rank in which or range(len(self)):
            request = offload.SaveRequest(folder, id=id * 32, rank=rank, ranks=len(self))
            self[rank].engine.checkpoints.save(request)

    def wait(self, *which: int) -> None:
        for rank in which or range(len(self)):
            self[rank].engine.checkpoints.wait(60)

    def give_up(self, rank: int, words: str) -> None:
        """Have a rank wait for the others for a moment, in vain."""
        saves = self[rank].engine._parts.saves
        assert saves is not None
        assert saves.pending is not None
        saves.pending.wait_for_ranks(0.05)
        with pytest.raises(offload.CheckpointError, match=words):
            self.wait(rank)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        for rank in self:
            rank.engine.close()


def shards(cuts: list[int], paths: list[Path] | None = None, limits: Limits | None = None) -> Ranks:
    found = Ranks()
    for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
        config = {} if paths is None else {"host_memory": 0, "paths": [paths[rank]]}
        found.append(Shard(start, stop, limits, **config))
    return found


def two(tmp_path: Path, **limits: float) -> Ranks:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    return shards([0, 3333, WHOLE], paths, Limits(**limits))


def joined(ranks: list[Shard]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*(rank.state() for rank in ranks), strict=True)]


def assert_holds(
    folder: Path, expected: list[torch.Tensor], cuts: tuple[int, ...] = (0, WHOLE), steps: int = 0
) -> None:
    """Check what as many ranks as there are pieces load, and have after some steps."""
    with shards([*cuts]) as others:
        with Checkpoint(folder) as checkpoint:
            for rank in others:
                rank.weight.zero_()
                rank.engine.checkpoints.load(checkpoint)
        others.step(steps)
        assert same(joined(others), expected)


@pytest.mark.parametrize("seeds", [(5, 5), (5, 6)])
def test_ranks_with_different_seeds_are_told_whose_counts(
    tmp_path: Path, seeds: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    chosen = {"state_format": "compact16", "subgroup_numel": 2048}
    ranks = Ranks(Shard(5000 * n, 5000 * (n + 1), seed=seed, **chosen) for n, seed in enumerate(seeds))
    with ranks:
        ranks.step()
        ranks.save(tmp_path)
        ranks.wait()
    again = Shard(0, WHOLE, seed=7, **chosen)
    with Checkpoint(tmp_path) as checkpoint:
        again.engine.checkpoints.load(checkpoint)
    assert again.engine._parts.tables.seed == 5
    again.engine.close()
    said = "saved by ranks with different seeds (5, 6); all go on with 5"
    assert (said in caplog.text) == (seeds == (5, 6))


def test_pieces_of_a_parameter_are_read_by_any_number_of_ranks(tmp_path: Path) -> None:
    with two(tmp_path) as ranks:
        ranks.step()
        ranks.save(tmp_path / "ck", 0)
        assert not is_checkpoint(tmp_path / "ck"), "committed without all ranks"
        ranks.save(tmp_path / "ck", 1)
        ranks.wait()
        ranks.step()
        after = joined(ranks)
    for cuts in ((0, WHOLE), (0, 1, 5000, WHOLE), (0, 3333, WHOLE)):
        assert_holds(tmp_path / "ck", after, cuts, steps=1)


def test_without_all_ranks_there_is_no_checkpoint(tmp_path: Path) -> None:
    failed = threading.Event()
    with shards([0, 3333, WHOLE]) as ranks:
        ranks.step()
        request = offload.SaveRequest(tmp_path / "ck", id="a" * 32, rank=0, ranks=2, on_done=lambda _: failed.set())
        ranks[0].engine.checkpoints.save(request)
        ranks.give_up(0, "other ranks")
        assert failed.wait(60)
        assert not is_checkpoint(tmp_path / "ck")
        with pytest.raises(offload.CheckpointError, match="no checkpoint"):
            Checkpoint(tmp_path / "ck")
        ranks[0].step()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_its_way_is_not_kept_waiting_for_another_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    monkeypatch.setattr(waits, "QUIET_S", 0.01)
    ranks = two(tmp_path, settle_s=0.05)
    ranks[rank].step()
    awaited = "manifests of ranks 1" if rank == 0 else "rank 0 to write COMMIT"
    said = f"{awaited}, so that {tmp_path / 'ck'} is a checkpoint"
    ranks.save(tmp_path / "ck", rank)
    deadline_s = time.monotonic() + 60
    while said not in caplog.text and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert said in caplog.text
    with pytest.raises(RuntimeError, match="a peer has gone"), ranks[rank].engine:
        raise RuntimeError("a peer has gone")
    assert "was not committed" in caplog.text
    assert not is_checkpoint(tmp_path / "ck")
    left = list((tmp_path / "ab"[rank]).iterdir())
    assert len(left) == rank  # rank 0 knows that there is no checkpoint, another one does not
    ranks[1 - rank].engine.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", ["begin", "commit"])
def test_a_rank_that_has_failed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, rank: int
) -> None:
    """Another rank gives up at once, and the next save leaves nothing of that."""

    def fail(*_: object) -> bytes:
        raise offload.CheckpointError("mine")

    with two(tmp_path) as ranks:
        ranks.step()
        ranks.save(tmp_path / "ck", 1 - rank)
        if moment == "begin":
            with monkeypatch.context() as patched:
                patched.setattr(DirectoryFolder, "prepare", fail)
                with pytest.raises(offload.CheckpointError, match="mine"):
                    ranks.save(tmp_path / "ck", rank)
        else:
            request = offload.SaveRequest(tmp_path / "ck", id="a" * 32, rank=rank, ranks=2, extra=fail)
            ranks[rank].engine.checkpoints.save(request)
        with pytest.raises(offload.CheckpointError, match=f"rank {rank} has failed"):
            ranks.wait(1 - rank)
        ranks.step()
        expected = joined(ranks)
        ranks.save(tmp_path / "ck", id="b")
        ranks.wait()
        assert not list((tmp_path / "ck").glob("failed-*"))
    assert_holds(tmp_path / "ck", expected)


def test_a_close_waits_for_other_ranks_so_long(tmp_path: Path) -> None:
    with two(tmp_path, close_s=0.05) as ranks:
        ranks[0].step()
        ranks.save(tmp_path / "ck", 0)
        ranks[0].engine.close()
        assert not list((tmp_path / "a").iterdir())


def test_what_a_rank_gave_up_may_be_committed_after_it_has_gone(tmp_path: Path) -> None:
    with two(tmp_path, close_s=0.05) as ranks:
        ranks.step()
        expected = joined(ranks)
        ranks.save(tmp_path / "ck", 1)
        ranks[1].engine.close()
        ranks.save(tmp_path / "ck", 0)
        ranks.wait(0)
    assert_holds(tmp_path / "ck", expected)


@pytest.mark.parametrize("outcome", ["committed", "given up", "moved", "never begun"])
def test_a_rank_that_goes_on_keeps_what_is_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """It writes many versions meanwhile, all beside the slots that the checkpoint may name."""
    ranks, folder = two(tmp_path), tmp_path / "ck"
    ranks.step()
    expected = joined(ranks)
    ranks.save(folder, 1)
    ranks.give_up(1, "waited for rank 0 to write COMMIT in vain")
    for _ in range(4):
        ranks[1].step()
    if outcome in ("committed", "moved"):
        ranks.save(folder, 0)
        ranks.wait(0)
        assert_holds(folder, expected)
    elif outcome == "given up":

        def prepare(folder: DirectoryFolder) -> None:
            raise offload.CheckpointError("as if")

        with monkeypatch.context() as patch:
            patch.setattr(DirectoryFolder, "prepare", prepare)
            with pytest.raises(offload.CheckpointError, match="as if"):
                ranks.save(folder, 0)
    if outcome == "moved":
        folder = folder.rename(tmp_path / "moved")
    for _ in range(4):
        ranks[0].step()
    before, expected = expected, joined(ranks)
    ranks.save(tmp_path / "next", id="b")
    ranks.wait()
    kept = [kept.id[0] for kept in ranks[1].engine._parts.saves.kept]  # type: ignore[union-attr]
    # Rank 0 keeps one, and may have released the first by the time that this one looks.
    assert kept == ["b"] or (kept == ["a", "b"] and outcome == "committed")
    (path,) = (tmp_path / "b").iterdir()
    assert ("a" * 32 in (path / "pins.json").read_text()) == ("a" in kept or outcome in ("moved", "never begun"))
    with ranks:
        ranks.step(2)
    if outcome == "moved":
        assert_holds(folder, before)
    assert_holds(tmp_path / "next", expected)


def test_a_doubt_is_settled_while_rank_0_releases_that_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `COMMIT` goes as soon as rank 1 has read it."""
    ranks = two(tmp_path)
    ranks.step()
    ranks.save(tmp_path / "ck", 1)
    ranks.give_up(1, "in vain")
    ranks.save(tmp_path / "ck", 0)
    ranks.wait(0)
    looked, released = threading.Event(), threading.Event()
    plain_read, plain_release = DirectoryFolder.read, commit.release

    def read(folder: DirectoryFolder, name: str) -> bytes | None:
        content = plain_read(folder, name)
        if folder.path == str(tmp_path / "ck") and name == "COMMIT" and not looked.is_set():
            looked.set()
            assert released.wait(60)
        return content

    def release(kept: commit.KeptCheckpoint, note: str, **options: Any) -> bool:
        assert looked.wait(60)
        done = plain_release(kept, note, **options)
        released.set()
        return done

    monkeypatch.setattr(DirectoryFolder, "read", read)
    monkeypatch.setattr(commit, "release", release)
    expected = joined(ranks)
    with ranks:
        ranks.save(tmp_path / "next", id="b")
        ranks.wait()
        assert released.is_set()
        assert not is_checkpoint(tmp_path / "ck")
        (path,) = (tmp_path / "b").iterdir()
        assert "a" * 32 not in (path / "pins.json").read_text()
        assert [kept.id[0] for kept in ranks[1].engine._parts.saves.kept] == ["b"]  # type: ignore[union-attr]
    assert_holds(tmp_path / "next", expected)


def test_a_commit_that_failed_with_its_name_in_place_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path) -> None:
        if (directory / "COMMIT").exists():
            raise OSError(5, "as if")

    with two(tmp_path) as ranks:
        ranks.step()
        expected = joined(ranks)
        monkeypatch.setattr("offload.tiers.filesystem.sync_directory", fail)
        ranks.save(tmp_path / "ck")
        with pytest.raises(offload.CheckpointError, match="as if"):
            ranks.wait(0)
        ranks.wait(1)
        ranks.step(3)
    assert_holds(tmp_path / "ck", expected)


def test_a_commit_that_cannot_be_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody lets go of older checkpoints for one that may not be there."""
    plain = DirectoryFolder.read

    def read(folder: DirectoryFolder, name: str) -> bytes | None:
        if name == "COMMIT":
            raise offload.CheckpointError("as if")
        return plain(folder, name)

    with two(tmp_path) as ranks:
        ranks[1].step()
        monkeypatch.setattr(DirectoryFolder, "read", read)
        ranks.save(tmp_path / "ck", 1)
        ranks.give_up(1, "in vain")


@pytest.mark.parametrize("call", ["wait", "save", "close", "load"])
def test_ctrl_c_is_a_way_out_of_waiting_for_another_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    ranks = two(tmp_path, settle_s=0.05)
    ranks[0].step()
    ranks[0].engine.checkpoints.save(offload.SaveRequest(tmp_path / "old"))
    ranks.wait(0)
    ranks.save(tmp_path / "ck", 0)
    plain, interrupted = waits.wait_for, []

    def wait_for(arrived: Callable[[float], object], *arguments: Any) -> bool:
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return plain(arrived, *arguments)

    engine = ranks[0].engine
    with monkeypatch.context() as patch, Checkpoint(tmp_path / "old") as old:
        patch.setattr(waits, "wait_for", wait_for)
        calls = {
            "wait": engine.checkpoints.wait,
            "load": lambda: engine.checkpoints.load(old),
            "save": lambda: ranks.save(tmp_path / "next", 0, id="b"),
            "close": engine.close,
        }
        with pytest.raises(KeyboardInterrupt):
            calls[call]()
    if call != "close":
        ranks[0].step()  # nothing has happened
        with pytest.raises(KeyboardInterrupt), engine:
            raise KeyboardInterrupt
    engine.close()
    assert engine._shutdown.work is not None
    assert engine._shutdown.work.wait(60)
    assert not is_checkpoint(tmp_path / "ck")
    ranks[1].engine.close()


def two_ranks(folder: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5000).bfloat16())
    config = offload.OffloadConfig(host_memory=0, paths=[folder], subgroup_numel=1024, threads=1)
    optimizer = offload.AdamW([("weight", weight)], lr=1e-2, offload=config)
    for step in range(4):
        weight.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.step()
        if step == 1:
            optimizer.save_checkpoint(Path(folder, "first"), extra={"rank": rank}, copy=True)
            optimizer.save_checkpoint(Path(folder, "ck"), extra={"rank": rank})
    optimizer.wait_checkpoint()
    dist.barrier()
    with Checkpoint(Path(folder, "ck")) as checkpoint:  # state that all ranks have is saved once
        assert [len(manifest.tiles) > 0 for manifest in checkpoint.manifests] == [True, False]
    after = [weight.detach().clone(), *optimizer.state_for(weight).values()]
    assert optimizer.load_checkpoint(Path(folder, "ck")) == {"rank": rank}
    for step in (2, 3):
        weight.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.step()
    again = [weight.detach(), *optimizer.state_for(weight).values()]
    assert same(after, again)
    torch.save(after, Path(folder, f"after-{rank}"))
    optimizer.close()
    dist.barrier()
    for life in range(3):  # rank 0 goes on in its store, rank 1 reads there for as long as it has to
        weight = torch.nn.Parameter(torch.zeros(5000).bfloat16())
        frozen = life == 2
        optimizer = offload.AdamW([("weight", weight)], lr=1e-2, offload=config)
        assert optimizer.load_checkpoint(Path(folder, "ck")) == {"rank": rank}
        dist.barrier()
        for step in (2, 3) if not frozen else ():
            weight.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.step()
        if not frozen:
            again = [weight.detach(), *optimizer.state_for(weight).values()]
            assert same(after, again)
        optimizer.save_checkpoint(Path(folder, f"ck-{life}"), extra={"rank": rank})
        optimizer.save_checkpoint(Path(folder, "ck"), extra={"rank": rank})
        optimizer.wait_checkpoint()
        dist.barrier()
        if life == 0:
            assert len(list(Path(folder, "rank-0").iterdir())) == 1
        # Back to where it was, for the next life.
        optimizer.load_checkpoint(Path(folder, "first"))
        optimizer.save_checkpoint(Path(folder, "ck"), extra={"rank": rank})
        optimizer.wait_checkpoint()
        dist.barrier()
        optimizer.close()
        dist.barrier()


@on_ranks(2)
def test_ranks_load_together_or_not_at_all(folder: Path) -> None:
    """What one rank cannot load, none goes on from: the next, older one has to be the same for all."""
    weight = torch.nn.Parameter(torch.ones(5000).bfloat16())
    optimizer = offload.AdamW([("weight", weight)], offload={"paths": [folder]})
    optimizer.save_checkpoint(folder / "ck")
    optimizer.wait_checkpoint()
    seen = folder / "ck" if dist.get_rank() == 0 else folder / "missing"
    with pytest.raises(offload.CheckpointError, match="missing" if dist.get_rank() else "rank 1 could not load"):
        optimizer.load_checkpoint(seen)
    optimizer.load_checkpoint(folder / "ck")
    optimizer.close()


@on_ranks(2)
def test_ranks_that_have_parted_neither_save_nor_load(folder: Path) -> None:
    """Each would take its shard for the whole, and end the checkpoint before."""
    model = fully_shard(torch.nn.Linear(8, 8), mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = offload.AdamW(model.named_parameters(), offload={"paths": [folder]})
    optimizer.save_checkpoint(folder / "ck")
    optimizer.wait_checkpoint()
    dist.barrier()
    dist.destroy_process_group()
    for what in (optimizer.save_checkpoint, optimizer.load_checkpoint, optimizer.import_state):
        with pytest.raises(offload.CheckpointError, match=r"made by 2 ranks, and torch\.distributed has 1 now"):
            what(folder / "next")
    assert is_checkpoint(folder / "ck")
    optimizer.close()


@on_ranks(2)
def test_the_first_of_ranks_that_had_all_state_may_save_and_load_alone(folder: Path) -> None:
    """As with DDP, whose training may have ended; the others would write the same folder."""
    model = torch.nn.Linear(8, 8)
    rank = dist.get_rank()
    optimizer = offload.AdamW(model.named_parameters(), offload={"paths": [folder]})
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        optimizer.save_checkpoint(folder / "ck")
        optimizer.wait_checkpoint()
        optimizer.load_checkpoint(folder / "ck")
    else:
        with pytest.raises(offload.CheckpointError, match="made by 2 ranks"):
            optimizer.save_checkpoint(folder / "ck")
    optimizer.close()


@on_ranks(2)
def test_ranks_that_save_to_different_folders_are_told_at_once(folder: Path) -> None:
    """As they wait for each other's manifests; one folder may have two names, so it is no error."""
    rank = dist.get_rank()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offload").addHandler(handler)
    with offload.AdamW([("weight", torch.nn.Parameter(torch.ones(5000)))], offload={"paths": [folder]}) as optimizer:
        for names in (("ck", "ck/"), ("ck", "again")):
            if rank and names[1] == "again":
                (folder / "again").symlink_to(folder / "ck")
            optimizer.save_checkpoint(f"{folder}/{names[rank]}")
            optimizer.wait_checkpoint()
            different = f"rank 0 saves to {folder}/ck, and rank 1 to {folder}/again: "
            assert any(text.startswith(different) for text in said) == (rank == 0 and names[1] == "again")


@on_ranks(2)
def test_a_rank_with_weights_of_its_own_may_have_skipped_a_step(folder: Path) -> None:
    rank = dist.get_rank()
    weight = torch.nn.Parameter(torch.ones(5000))
    with offload.AdamW([(f"weight{rank}", weight)], offload={"paths": [folder]}) as optimizer:
        for _ in range(3 - rank):
            weight.grad = torch.ones(5000)
            optimizer.step()
        optimizer.save_checkpoint(folder / "ck")
        optimizer.wait_checkpoint()
        saved = weight.detach().clone()
        weight.grad = torch.ones(5000)
        optimizer.step()
        optimizer.load_checkpoint(folder / "ck")
        assert same([saved, torch.tensor(3.0 - rank)], [weight.detach(), optimizer.state[weight]["step"]])
        assert optimizer.engine.step_number == 3  # of the rank that has taken most


@on_ranks(2)
def test_a_rank_that_leaves_a_folder_by_an_error_is_not_waited_for(folder: Path) -> None:
    """It goes on with the others, who hear of it when they leave; the folder is not whole."""
    weight = torch.nn.Parameter(torch.ones(5000).bfloat16())
    optimizer = offload.AdamW([("weight", weight)], offload={"paths": [folder]})
    run = folder / "run"

    def save(failing: int) -> None:
        with optimizer.checkpoint_folder(run):
            optimizer.save_checkpoint(run / "optimizer")
            if dist.get_rank() == failing:
                raise OSError("mine")
        assert failing == -1

    for failing in (0, 1):
        error, words = (OSError, "mine") if dist.get_rank() == failing else (offload.CheckpointError, "has failed")
        with pytest.raises(error, match=words):
            save(failing)
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert int(ones.sum()) == 6
        assert mark_of(str(run)) is Mark.BEGUN
    save(-1)
    assert mark_of(str(run)) is Mark.WHOLE
    optimizer.close()


@pytest.mark.slow
def test_two_ranks_save_and_one_resumes(tmp_path: Path) -> None:
    spawn(2, tmp_path, two_ranks)
    weight = torch.nn.Parameter(torch.zeros(5000).bfloat16())
    with offload.AdamW([("weight", weight)], lr=1e-2) as optimizer:
        assert optimizer.load_checkpoint(tmp_path / "ck") == {"rank": 0}
        for step in (2, 3):
            weight.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.step()
        again = [weight.detach(), *optimizer.state_for(weight).values()]
        for rank in range(2):
            after = torch.load(tmp_path / f"after-{rank}")
            assert same(after, again)
