"""What ranks agree on before a save: whose weights are whose, and what a checkpoint calls them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from recorded_engine import RecordedEngine, bound_to

from offload.checkpoint.request import SaveRequest
from offload.errors import CheckpointError
from offload.optim import ranks
from offload.optim.ranks import agree_on_save
from offload.optim.shards import Cut
from offload.optim.weights import BoundParameter

Weights = list[BoundParameter]


def make(value: float = 1.0, numel: int = 6, **names: str) -> Weights:
    """Return weights of one rank, each of one value, by their names."""
    parameters = [torch.nn.Parameter(torch.full((numel,), value)) for _ in names]
    bounds = [*bound_to(RecordedEngine(), parameters).bound.values()]
    for bound, name in zip(bounds, names.values(), strict=True):
        bound.name = name
    return bounds


class Updated(RecordedEngine):
    """An engine that has made some updates; each value of its state is `moment`."""

    def __init__(self, steps: int = 1, moment: float = 0.0) -> None:
        super().__init__()
        self.steps, self.moment, self.state = steps, moment, self

    def read(self, positions: list[int], *, own_masters: bool) -> list[dict[str, torch.Tensor]]:
        return [{"exp_avg": torch.full((6,), self.moment)} for _ in positions]


def agree(
    monkeypatch: pytest.MonkeyPatch, everyone: list[Weights], engines: list[Updated] | None = None
) -> list[SaveRequest | CheckpointError]:
    """Have each rank agree with the others: once to hear what each says, then with what all have said."""
    monkeypatch.setattr(ranks, "any_rank", bool)
    engines = engines or [Updated() for _ in everyone]
    said: dict[int, Any] = {}
    found: list[SaveRequest | CheckpointError] = []
    for heard in (False, True):
        for rank, bounds in enumerate(everyone):

            def gather(out: list[Any], mine: Any, rank: int = rank, heard: bool = heard) -> None:
                said[rank] = said[rank] if heard else mine
                out[:] = [said[n] for n in range(len(out))] if heard else [mine] * len(out)

            monkeypatch.setattr(ranks, "world", lambda rank=rank: (len(everyone), rank))
            monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
            try:
                agreed = agree_on_save(SaveRequest("ck"), bounds, engines[rank])  # type: ignore[arg-type]
            except CheckpointError as error:
                agreed = error  # type: ignore[assignment]
            if heard:
                found.append(agreed)
    return found


def cut(bound: BoundParameter, start: int) -> BoundParameter:
    """Return a weight of which this rank has three elements."""
    bound.cut = Cut(None, (), ((start, 3),), start, True)
    return bound


def test_one_process_agrees_with_itself() -> None:
    engine: Any = Updated()
    agreed = agree_on_save(SaveRequest("ck"), make(a="_orig_mod.a", b="_orig_mod.b"), engine)
    assert (agreed.ranks, agreed.rank, agreed.replica, agreed.metadata) == (1, 0, False, {"prefix": ""})
    assert agreed.names == {"_orig_mod.a": "a", "_orig_mod.b": "b"}
    assert agreed.id != agree_on_save(SaveRequest("ck"), [], engine).id
    assert not agreed.find_ended()


@pytest.mark.parametrize(
    ("everyone", "replicas", "names"),
    [
        ([make(a="module.a") for _ in range(3)], [False, True, True], {"module.a": "a"}),
        ([make(a="module.a"), make(b="module.b")], [False, False], {"module.a": "a", "module.b": "b"}),
        (
            [[cut(bound, 3 * rank) for bound in make(float(rank), a="a")] for rank in range(2)],
            [False, False],
            {"a": "a"},
        ),
    ],
    ids=["the same", "own names", "pieces"],
)
def test_ranks_whose_weights_do_not_clash(
    monkeypatch: pytest.MonkeyPatch, everyone: list[Weights], replicas: list[bool], names: dict[str, str]
) -> None:
    found = agree(monkeypatch, everyone)
    assert [each.replica for each in found] == replicas
    assert {each.metadata["prefix"] for each in found} == {""}
    assert {each.id for each in found} == {found[0].id}  # rank 0's
    assert all(each.names == names for each in found)  # all ranks' alike
    assert not any(each.find_ended() for each in found)


@pytest.mark.parametrize(
    "other",
    [make(2.0, a="layer.a"), make(numel=7, a="layer.a"), [cut(bound, 0) for bound in make(2.0, a="layer.a")]],
    ids=["values", "size", "piece"],
)
def test_other_weights_of_the_same_name_are_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, other: Weights
) -> None:
    mine = make(a="layer.a")
    if other[0].cut is not None:
        cut(mine[0], 0)
    for error in agree(monkeypatch, [mine, other]):
        assert isinstance(error, CheckpointError)
        assert "ranks 0 and 1 have different weights that are both called layer.a" in str(error)


@pytest.mark.parametrize("other", [Updated(steps=2), Updated(moment=1.0)], ids=["steps", "moments"])
def test_the_same_weights_with_other_state_are_no_replicas(monkeypatch: pytest.MonkeyPatch, other: Updated) -> None:
    """As of ranks that train by themselves and have just averaged their weights."""
    for error in agree(monkeypatch, [make(a="a"), make(a="a")], [Updated(), other]):
        assert isinstance(error, CheckpointError)
        assert "ranks 0 and 1 have weights with different state that are both called a" in str(error)
    everyone = [make(a=f"rank{rank}.a") for rank in range(2)]  # with names of their own each saves its own
    assert not any(found.replica for found in agree(monkeypatch, everyone, [Updated(), other]))


def test_state_is_compared_where_both_ranks_have_sampled_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with experts of their own sample those, where they are smaller than a weight that both ranks have."""
    monkeypatch.setattr(ranks, "SAMPLED", 1)
    everyone = [[*make(a="a"), *make(numel=2, b="expert0")], make(a="a")]
    assert [found.replica for found in agree(monkeypatch, everyone)] == [False, False]
    for error in agree(monkeypatch, everyone, [Updated(), Updated(steps=2)]):  # counts are compared for all
        assert "weights with different state that are both called a" in str(error)


def test_weights_that_nobody_has_named_are_saved_by_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "param_groups[0].params[0]"
    found = agree(monkeypatch, [make(1.0, a=name), make(2.0, a=name)])
    assert [each.metadata["prefix"] for each in found] == ["rank0.", "rank1."]
    assert [each.names for each in found] == [{name: f"rank{rank}.{name}"} for rank in range(2)]
    assert "each rank saves its own" in caplog.text


def test_a_process_that_has_ended_is_seen_where_it_was() -> None:
    this = ranks.Process.this()
    assert this is not None
    assert this.pid == os.getpid()
    assert ranks.Process.this() == this
