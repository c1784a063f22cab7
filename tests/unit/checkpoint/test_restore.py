"""What a session takes of a checkpoint: by which names, in which ranges, and what it refuses first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from written import layout_of

from offload.checkpoint.reader import Range
from offload.checkpoint.restore import Restorer
from offload.dtypes import DtypeCode
from offload.errors import CheckpointError
from offload.layout import Parameter
from offload.rules import ADAMW, LION

BF16 = DtypeCode.BFLOAT16


class Source:
    """A checkpoint in memory: each tensor's elements are its number, times 1000, plus where they are."""

    path, rule, last_version, metadata, step = "ck", ADAMW, 0, {}, 5
    rounding: Any = None

    def __init__(self, numels: dict[str, int], tensors: Sequence[str] = ADAMW.names) -> None:
        self.numels, self.tensors = numels, tensors
        self.names = [*numels]
        self.asked: list[tuple[str, str, int, int]] = []

    def full_numel(self, name: str) -> int:
        return self.numels[name]

    def rule_of(self, name: str) -> Any:
        return self.rule

    def keeps(self, name: str, rule: Any) -> bool:
        return bool(self.rule.name == rule.name)

    def step_of(self, name: str) -> int:
        return 10 + self.names.index(name)

    def has(self, name: str, tensor: str) -> bool:
        return tensor in self.tensors

    def read(self, ranges: Sequence[Range]) -> None:
        for each in ranges:
            self.asked.append((each.name, each.tensor, each.start, each.out.numel()))
            number = ADAMW.names.index(each.tensor)
            each.out.copy_(torch.arange(each.out.numel()) + (1000.0 * number + each.start))


class Views:
    """State of a session in plain tensors, lent segment by segment."""

    def __init__(self, layout: Any) -> None:
        self.plan = SimpleNamespace(layout=layout)
        self.lent: dict[int, dict[str, torch.Tensor]] = {}

    @contextlib.contextmanager
    def on_host(self, run: Any) -> Iterator[Any]:
        yield SimpleNamespace(weights_address=None)

    @contextlib.contextmanager
    def piece(self, run: Any, view: Any, segment: Any, *, sets_master: bool) -> Iterator[dict[str, torch.Tensor]]:
        assert sets_master
        self.lent[segment.parameter] = {name: torch.full((segment.numel,), 5.0) for name in ADAMW.names}
        yield self.lent[segment.parameter]

    def weight(self, subgroup: int, segment: Any, view: Any) -> torch.Tensor:
        return torch.full((segment.numel,), -7.0)


def make(source: Source, parameters: list[Parameter], **names: str) -> tuple[Restorer, Views, Any]:
    views = Views(layout_of(*parameters))
    tables: Any = SimpleNamespace(steps=[0] * len(parameters), numbers=[0] * len(parameters), seed=1, told=[])
    tables.note_masters_current = tables.told.append
    restorer = Restorer(source, parameters, names, views, tables, None)  # type: ignore[arg-type]
    return restorer, views, tables


def visit(subgroup: int) -> Any:
    return SimpleNamespace(visit=SimpleNamespace(subgroup=subgroup))


A, B = Parameter("a", 4, BF16, 0), Parameter("b", 6, BF16, 0)


def test_state_and_counts_are_taken_by_the_names_that_the_checkpoint_has() -> None:
    source = Source({"b": 6, "bare": 4, "more": 9})  # what else it has is not asked for
    restorer, views, tables = make(source, [A, B], a="bare")
    assert restorer.saved_names == ["bare", "b"]
    restorer.restore_step_counts()
    assert (tables.steps, tables.seed) == ([11, 10], 1)
    restorer.restore(visit(0))
    assert {name for name, *_ in source.asked} == {"bare", "b"}
    for number, name in enumerate(ADAMW.names):
        assert views.lent[0][name].tolist() == [1000.0 * number + n for n in range(4)]
        assert views.lent[1][name].tolist() == [1000.0 * number + n for n in range(6)]
    assert tables.told == [0]


def test_what_stochastic_rounding_depends_on_is_the_checkpoint_s() -> None:
    source = Source({"a": 4, "b": 6})
    source.rounding = 42, {"a": 8, "b": 9}
    restorer, _, tables = make(source, [A, B])
    restorer.restore_step_counts()
    assert (tables.seed, tables.numbers) == (42, [8, 9])


def test_a_master_that_is_missing_is_the_weight() -> None:
    source = Source({"a": 4}, ("exp_avg", "exp_avg_sq"))
    restorer, views, _ = make(source, [A])
    restorer.restore(visit(0))
    assert views.lent[0]["master"].tolist() == [-7.0] * 4
    assert [tensor for _, tensor, *_ in source.asked] == ["exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize(
    ("piece", "ranges"),
    [
        (Parameter("a", 4, BF16, 0, 8, 24), [(8, 4)]),
        (Parameter("a", 6, BF16, 0, 5, 24, (6, 4), (4, 1), box=((1, 3), (1, 2))), [(5, 2), (9, 2), (13, 2)]),
    ],
    ids=["run", "box"],
)
def test_a_piece_is_read_where_it_lies_in_the_whole(piece: Parameter, ranges: list[tuple[int, int]]) -> None:
    source = Source({"a": 24})
    restorer, views, _ = make(source, [piece])
    restorer.restore(visit(0))
    assert [(start, numel) for _, tensor, start, numel in source.asked if tensor == "master"] == ranges
    wanted = [float(start + n) for start, numel in ranges for n in range(numel)]
    assert views.lent[0]["master"].tolist() == wanted


def test_a_parameter_in_several_subgroups() -> None:
    source = Source({"a": 3000})
    restorer, views, tables = make(source, [Parameter("a", 3000, BF16, 0)])
    for number, subgroup in enumerate(views.plan.layout.subgroups):
        source.asked.clear()
        restorer.restore(visit(number))
        (segment,) = subgroup.segments
        assert source.asked[0] == ("a", "master", segment.start, segment.numel)
    assert tables.told == [0, 1, 2]


def test_what_begins_anew_has_no_state_and_its_weight_for_a_master() -> None:
    source = Source({"a": 4})
    source.rounding = 42, {"a": 8}
    views = Views(layout_of(A, B))
    tables: Any = SimpleNamespace(steps=[3, 4], numbers=[0, 9], seed=1, note_masters_current=lambda subgroup: None)
    restorer = Restorer(source, [A, B], {}, views, tables, None, anew={"b"})  # type: ignore[arg-type]
    restorer.restore_step_counts()
    assert (tables.steps, tables.numbers) == ([10, 0], [8, 9])
    restorer.restore(visit(0))
    assert {name for name, *_ in source.asked} == {"a"}
    found = {name: tensor.tolist() for name, tensor in views.lent[1].items()}
    assert found == {"master": [-7.0] * 6, "exp_avg": [0.0] * 6, "exp_avg_sq": [0.0] * 6}
    with pytest.raises(CheckpointError, match="it has no b"):
        Restorer(source, [A, B], {}, views, tables, None, anew={"a"})  # type: ignore[arg-type]


MANY = [Parameter(name, 4, BF16, 0) for name in "abcde"]
OF_LION = Source({"a": 4})
OF_LION.rule = LION


@pytest.mark.parametrize(
    ("source", "parameters", "words"),
    [
        (Source({"a": 4}), [A, B], "is of another model: it has no b; it has a, ...$"),
        (Source({"x": 4, "y": 1, "z": 1, "u": 1}), [A, B], "it has no a, b; it has x, y, z, ..."),
        (Source({"x": 4}), MANY, "it has no a, b, c and 2 more; it has x"),
        (Source({"a": 4, "b": 7}), [A, B], "is of another model: b has 7 elements there and 6 here"),
        (Source({"param_groups[0].params[0]": 4}), [A, B], r"from parameters\(\), the other from named_parameters"),
        (OF_LION, [A], "state of the rule 'lion', and this optimizer's is 'adam'"),
    ],
)
def test_another_model_or_rule_is_refused(source: Source, parameters: list[Parameter], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^ck .*{words}"):
        make(source, parameters)
