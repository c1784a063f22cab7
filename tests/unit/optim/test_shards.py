"""Which rows of a tensor a rank has, where they lie in the whole, and how ranks exchange them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.errors import ConfigError
from offload.optim import shards
from offload.optim.dealt import fail_together
from offload.optim.shards import Cut


class Mesh:
    """A mesh of one dimension, of which this process is some rank; its group is the mesh."""

    group_name, device_type = "all", "cpu"

    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank

    def get_group(self, dimension: int = 0) -> Mesh:
        return self


def rows(shape: tuple[int, ...], ranks: int) -> list[Cut]:
    found = [shards.cut_of(torch.empty(shape), "p", Mesh(ranks, rank)) for rank in range(ranks)]
    assert all(found)
    return [cut for cut in found if cut is not None]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(1,), (4,), (5,), (6, 3), (3, 2, 2), (8, 1), (2, 0), (0, 5)])
def test_rows_are_those_of_torch_s_chunks(shape: tuple[int, ...], ranks: int) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    chunks = whole.chunk(ranks)
    for rank, cut in enumerate(rows(shape, ranks)):
        mine = shards.own(whole, cut)
        assert torch.equal(mine, chunks[rank] if rank < len(chunks) else whole[:0])
        assert cut.is_run
        assert whole.flatten()[cut.start : cut.start + mine.numel()].tolist() == mine.flatten().tolist()
        assert cut.box[0][1] == len(mine)
        assert cut.box[1:] == tuple((0, size) for size in shape[1:])


def test_what_is_not_cut() -> None:
    whole = torch.nn.Parameter(torch.ones(4, 2))
    assert shards.cut_of(whole, "p", None) is None
    assert shards.cut_of(torch.tensor(3.0), "p", Mesh(2, 1)) is None  # each rank has all of a scalar
    assert shards.own(whole, None) is whole
    assert shards.local(whole) is whole
    assert shards.counting_tensors(whole) == (whole,)
    assert shards.placed_as(whole, torch.ones(1))
    assert shards.rank_elements_of("state", whole, None) is whole
    assert shards.reduced_gradient(torch.ones(3), whole, "p").shape == (3,)


@pytest.mark.parametrize("tensor", [torch.empty(3, 4).t(), torch.empty(4, 6)[:, ::2], torch.empty(3, 1).expand(3, 4)])
def test_what_is_cut_has_to_be_contiguous(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"p: .strides .* contiguous"):
        shards.cut_of(tensor, "p", Mesh(2, 0))


def test_versions_count_changes_and_memory_is_freed() -> None:
    tensor = torch.zeros(5)
    before = shards.version(tensor)
    tensor.add_(1)
    assert shards.version(tensor) == before + 1
    shards.free_memory(tensor)
    assert tensor.numel() == 0
    assert shards.version(tensor) == before + 1


def test_values_take_the_parameter_s_form_without_a_copy() -> None:
    flat = torch.arange(6.0)
    found = shards.in_form(flat, torch.empty(3, 2).t(), None)
    assert found.data_ptr() == flat.data_ptr()
    assert found.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def exchange(monkeypatch: pytest.MonkeyPatch, ranks: int, call: Any) -> None:
    """Make `call(rank)` for each rank twice: first to hear what it gives, then with what all others give."""
    given: list[list[torch.Tensor]] = [[] for _ in range(ranks)]

    def give(out: Any, mine: torch.Tensor, group: Mesh) -> None:
        given[group.rank].append(mine.clone())
        for rank, part in enumerate(out if isinstance(out, list) else out.view(ranks, -1)):
            part.copy_(mine if rank == group.rank else torch.zeros_like(mine))

    def take(out: Any, mine: torch.Tensor, group: Mesh) -> None:
        turn = turns[group.rank]
        turns[group.rank] += 1
        assert mine.shape == given[group.rank][turn].shape
        for rank, part in enumerate(out if isinstance(out, list) else out.view(ranks, -1)):
            part.copy_(given[rank][turn])

    turns = [0] * ranks
    for collective in (give, take):
        for name in ("all_gather", "all_gather_into_tensor"):
            monkeypatch.setattr(torch.distributed, name, collective)
        for rank in range(ranks):
            call(rank)
    assert len({len(mine) for mine in given}) == 1  # as often on every rank
    assert turns == [len(mine) for mine in given]


@pytest.mark.parametrize("gather_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_exchange_the_rows_that_each_has_updated(
    monkeypatch: pytest.MonkeyPatch, ranks: int, gather_bytes: int
) -> None:
    monkeypatch.setattr(shards, "GATHER_BYTES", gather_bytes)
    shapes = [(7, 3), (1, 5), (4,), (2, 0), (10, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float16]
    wanted = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    weights: list[list[torch.Tensor]] = []
    for rank in range(ranks):
        mine = [torch.full_like(weight, -1) for weight in wanted]
        for weight, new, shape in zip(mine, wanted, shapes, strict=True):
            cut = rows(shape, ranks)[rank]
            shards.own(weight, cut).copy_(shards.own(new, cut))
        weights.append(mine)
    exchange(monkeypatch, ranks, lambda rank: shards.gather(weights[rank], Mesh(ranks, rank)))
    for mine in weights:
        assert all(map(torch.equal, mine, wanted))


def test_no_exchange_takes_more_memory_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(shards, "GATHER_BYTES", 300)
    monkeypatch.setattr(
        torch.distributed, "all_gather_into_tensor", lambda out, mine, group: sizes.append(len(out) + len(mine))
    )
    shards.gather([torch.zeros(100), torch.zeros(3)], Mesh(2, 0))
    assert sizes == [300, 300, 24]


def test_sums_count_replicated_pieces_once_and_are_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, replicated = (SimpleNamespace(is_replicate=lambda value=value: value) for value in (False, True))
    found: dict[int, float] = {}

    def add(rank: int) -> None:
        mesh = Mesh(3, rank)
        cuts = [Cut(mesh, (placement,), ((0, 1),), 0, True) for placement in (sharded, replicated)]
        numbers = (1e16, 1.0, -1e16)  # one after another, rounded, they would be 0
        more = 0.5 if rank == 1 else 0.0
        found[rank] = shards.total([(cuts[0], numbers[rank]), (cuts[1], 100.0), (None, 1000.0), (cuts[0], more)])

    exchange(monkeypatch, 3, add)
    assert found == dict.fromkeys(range(3), 1101.5)


def test_a_sum_of_what_is_whole_takes_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_gather", None)
    assert shards.total([]) == 0.0
    assert shards.total([(None, 2.0), (None, 0.5)]) == 2.5


def test_who_fails_on_one_mesh_is_heard_on_the_next() -> None:
    """Ranks of several meshes ask each in turn: who left at the first would have those of the next wait for ever."""
    heard: list[Exception | None] = []
    closed: list[None] = []

    def mesh(failed: list[tuple[int, str]]) -> Any:
        def gather_failures(error: Exception | None) -> list[tuple[int, str]]:
            heard.append(error)
            return failed

        return SimpleNamespace(ranks=2, gather_failures=gather_failures)

    error = fail_together([mesh([(1, "no room")]), mesh([])], None, lambda: closed.append(None))
    assert "rank 1 failed: no room" in str(error)
    assert heard == [None, error]
    assert closed == [None]
