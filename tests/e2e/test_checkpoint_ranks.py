"""Checkpoints of several ranks: one commit for all, any number of ranks at load."""

from __future__ import annotations

import itertools
import threading
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import offload
from offload.checkpoint import commit
from offload.checkpoint.contents import is_checkpoint
from offload.checkpoint.manifest import Piece
from offload.checkpoint.reader import Checkpoint

WHOLE = 10_000
SCALARS = offload.GroupScalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


class Shard:
    """One rank's run of a parameter, in an engine of its own."""

    def __init__(self, start: int, stop: int, **config: object) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(WHOLE, generator=generator).bfloat16()[start:stop].clone()
        gradient = torch.randn(WHOLE, generator=generator).bfloat16()[start:stop].clone()
        self.gradient = gradient
        self.pieces = [Piece(start, WHOLE)]
        parameter = offload.Parameter("weight", stop - start, offload.DtypeCode.BFLOAT16, 0)
        self.engine = offload.Engine([parameter], offload.OffloadConfig(subgroup_numel=1024, **config))
        self.engine.bind_weight(0, self.weight.data_ptr())
        self.engine.bind_gradient(0, gradient.data_ptr(), offload.DtypeCode.BFLOAT16)

    def step(self) -> None:
        self.engine.step([SCALARS])

    def state(self) -> list[torch.Tensor]:
        (found,) = self.engine.read_state([0])
        return [self.weight.clone(), *found.values()]


def shards(cuts: list[int], paths: list[Path] | None = None) -> list[Shard]:
    found = []
    for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
        config = {} if paths is None else {"host_memory": 0, "paths": [paths[rank]]}
        found.append(Shard(start, stop, **config))
    return found


def joined(ranks: list[Shard]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*(rank.state() for rank in ranks), strict=True)]


def test_pieces_of_a_parameter_are_read_by_any_number_of_ranks(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    ranks = shards([0, 3333, WHOLE], paths)
    for rank in ranks:
        rank.step()
    id = uuid.uuid4().hex
    for number, rank in enumerate(ranks):
        rank.engine.save(tmp_path / "ck", pieces=rank.pieces, id=id, rank=number, ranks=2)
        assert number or not is_checkpoint(tmp_path / "ck"), "committed without all ranks"
    for rank in ranks:
        rank.engine.wait_checkpoint(60)
        rank.step()
    after = joined(ranks)
    for rank in ranks:
        rank.engine.close()
    for cuts in ([0, WHOLE], [0, 1, 5000, WHOLE], [0, 3333, WHOLE]):
        others = shards(cuts)
        with Checkpoint(tmp_path / "ck") as checkpoint:
            for rank in others:
                rank.weight.zero_()
                rank.engine.load(checkpoint, pieces=rank.pieces)
        for rank in others:
            rank.step()
        assert all(torch.equal(left, right) for left, right in zip(joined(others), after, strict=True))
        for rank in others:
            rank.engine.close()


def test_without_all_ranks_there_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "RANKS_TIMEOUT_S", 0.2)
    ranks = shards([0, 3333, WHOLE])
    failed = threading.Event()
    for rank in ranks:
        rank.step()
    ranks[0].engine.save(
        tmp_path / "ck", pieces=ranks[0].pieces, id="a" * 32, rank=0, ranks=2, on_done=lambda error: failed.set()
    )
    with pytest.raises(offload.CheckpointError, match="other ranks"):
        ranks[0].engine.wait_checkpoint(60)
    assert failed.wait(60)
    assert not is_checkpoint(tmp_path / "ck")
    with pytest.raises(offload.CheckpointError, match="no checkpoint"):
        Checkpoint(tmp_path / "ck")
    ranks[0].step()
    for rank in ranks:
        rank.engine.close()


def worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    try:
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
        assert all(torch.equal(left, right) for left, right in zip(after, again, strict=True))
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
                assert all(torch.equal(left, right) for left, right in zip(after, again, strict=True))
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
        optimizer = offload.AdamW([(f"weight-{rank}", torch.nn.Parameter(torch.full((100,), rank + 1.0)))])
        optimizer.save_checkpoint(Path(folder, "apart"))  # of different weights each rank saves its own
        optimizer.wait_checkpoint()
        dist.barrier()
        with Checkpoint(Path(folder, "apart")) as checkpoint:
            assert [len(manifest.tiles) > 0 for manifest in checkpoint.manifests] == [True, True]
        optimizer.close()
        optimizer = offload.AdamW([("weight", torch.nn.Parameter(torch.full((100,), rank + 1.0)))])
        with pytest.raises(offload.CheckpointError, match=r"ranks 0 and 1 have different weights .* called weight"):
            optimizer.save_checkpoint(Path(folder, "mixed"))
        optimizer.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_save_and_one_resumes(tmp_path: Path) -> None:
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2)
    weight = torch.nn.Parameter(torch.zeros(5000).bfloat16())
    with offload.AdamW([("weight", weight)], lr=1e-2) as optimizer:
        assert optimizer.load_checkpoint(tmp_path / "ck") == {"rank": 0}
        for step in (2, 3):
            weight.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.step()
        again = [weight.detach(), *optimizer.state_for(weight).values()]
        for rank in range(2):
            after = torch.load(tmp_path / f"after-{rank}")
            assert all(torch.equal(left, right) for left, right in zip(after, again, strict=True))
