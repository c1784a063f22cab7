"""Weights: which can be updated, what the engine is told of those that changed, and what is warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_engine import RecordedEngine, bound_to

from offload.dtypes import DtypeCode
from offload.errors import ConfigError
from offload.optim import weights as module
from offload.optim.weights import Weights, check_parameter, differing


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda: torch.zeros(3, dtype=torch.complex64), "complex64"),
        (lambda: torch.zeros(3, dtype=torch.int64), "int64"),
        (lambda: torch.zeros(3, dtype=torch.float64), "float64"),
        (lambda: torch.zeros(3, 4).to_sparse(), "dense"),
        (lambda: torch.zeros(3, 4)[:, :2], "strides"),
        (lambda: torch.zeros(1).expand(3), "strides"),
        (lambda: torch.zeros(3, device="meta"), "meta"),
        (lambda: torch._neg_view(torch.ones(3)), "resolve_neg"),
    ],
)
def test_weights_that_cannot_be_updated(tensor: Callable[[], torch.Tensor], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_parameter(tensor(), "p", None)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4).t(),
        torch.zeros(()),
        torch.zeros(2, 0),
        torch.zeros(2, 3, 4).permute(1, 2, 0),
        torch.zeros(4, 2)[:, :1][:1],
        torch.zeros(3).half(),
    ],
    ids=lambda tensor: str(tuple(tensor.stride())),
)
def test_weights_that_can_be(tensor: torch.Tensor) -> None:
    check_parameter(tensor, "p", None)
    check_parameter(tensor, "p", torch.device("cpu"))
    with pytest.raises(ConfigError, match="have all weights on meta"):
        check_parameter(tensor, "p", torch.device("meta"))


def as_grouped(parameter: torch.Tensor, name: str, group: int) -> tuple[int, None]:
    """Keep a parameter's state as its group's."""
    return group, None


def test_what_the_engine_is_told_of_weights() -> None:
    engine = RecordedEngine()
    weights: Any = Weights(engine)  # type: ignore[arg-type]
    (first, second), (third,) = make((3, 4), ()), make((2,), dtype=torch.float32)
    groups = [{"params": [first], "param_names": ["a"]}, {"params": [second, third]}]
    described = weights.describe(groups, [first, third], as_grouped)
    assert [(p.name, p.numel, p.dtype, p.group) for p in described] == [
        ("a", 12, DtypeCode.BFLOAT16, 0),
        ("param_groups[1].params[1]", 2, DtypeCode.FLOAT32, 1),
    ]
    assert [(p.shape, p.stride, p.start, p.unsharded_numel) for p in described] == [
        ((3, 4), (4, 1), 0, 12),
        ((2,), (1,), 0, 2),
    ]
    bound = weights.bind(first, "a")
    assert engine.said() == [("bind_weight", 0, first.data_ptr())]
    assert bound.stamp[:2] == (first.data_ptr(), first._version)


@pytest.mark.parametrize(
    ("parts", "shares"),
    [
        ([slice(0, 100), slice(100, 300)], False),
        ([slice(0, 100), slice(99, 300)], True),
        ([slice(100, 300), slice(0, 101)], True),  # in any order
        ([slice(0, 300), slice(100, 100)], False),  # an empty one shares nothing
        ([slice(0, 300), slice(0, 300)], True),
    ],
)
def test_weights_that_share_memory(parts: list[slice], shares: bool) -> None:
    memory = torch.zeros(300)
    first, second = (torch.nn.Parameter(memory[part]) for part in parts)
    weights: Any = Weights(RecordedEngine())  # type: ignore[arg-type]
    groups = [{"params": [first, second], "param_names": ["a", "b"]}]
    if not shares:
        assert len(weights.describe(groups, [first, second], as_grouped)) == 2
        return
    with pytest.raises(ConfigError, match="a and b, which share memory"):
        weights.describe(groups, [first, second], as_grouped)
    weights.bound[first] = weights.bind(first, "a")  # and one that is bound already
    with pytest.raises(ConfigError, match="a and b, which share memory"):
        weights.describe(groups, [second], as_grouped)


def test_what_was_undone_is_dealt_as_for_the_first_time() -> None:
    first, *later = make((4, 4), (4, 4), (4, 4), (4, 4))
    mesh: Any = SimpleNamespace(size=lambda: 3, get_local_rank=lambda: 0)
    mesh.get_group = lambda: SimpleNamespace(group_name="ranks")
    weights: Any = Weights(RecordedEngine())  # type: ignore[arg-type]
    weights.deal(mesh, {first: 0.1}, {})
    works = dict(zip(later, (0.7, 0.2, 0.15), strict=True))
    weights.deal(mesh, works, {})
    owners = dict(weights.owners)
    assert [owners[parameter] for parameter in (first, *later)] == [0, 1, 2, 0]
    weights.undo_deal(later)
    assert weights.owners == {first: 0}
    weights.deal(mesh, works, {})
    assert weights.owners == owners


def nothing(weight: torch.nn.Parameter) -> None:
    pass


def write(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(1)


def move(weight: torch.nn.Parameter) -> None:
    weight.data = weight.detach().clone()


def move_back(weight: torch.nn.Parameter) -> None:
    """Give a weight other memory at the same address, which the allocator does on the second `.data = ...`."""
    words = weight.detach().view(torch.int16).numpy()
    weight.data = torch.from_numpy(words).view(weight.dtype)


@pytest.mark.parametrize(
    ("change", "steps", "dtype", "told", "warned"),
    [
        (nothing, 1, torch.bfloat16, [], False),
        (write, 1, torch.bfloat16, ["bind_weight", "match_master"], True),
        (write, 0, torch.bfloat16, ["bind_weight", "match_master"], False),  # nothing has been lost
        (write, 1, torch.float32, ["bind_weight", "match_master"], False),  # a weight is its master
        (move, 1, torch.bfloat16, ["bind_weight", "match_master"], True),
        (move_back, 1, torch.bfloat16, ["bind_weight", "match_master"], True),
    ],
)
def test_weights_that_changed_since_they_were_left(
    change: Any, steps: int, dtype: Any, told: list[str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, parameters = RecordedEngine(), make((5,), (5,), dtype=dtype)
    weights, engine.steps = bound_to(engine, parameters), steps
    change(parameters[1])
    for _ in range(2):
        assert weights.are_where_bound() == (change is not move)
        with caplog.at_level(logging.INFO, "offload"):
            weights.rebind_changed()
        said = engine.said()
        assert [call for call, *_ in said] == told
        assert all(position == 1 for _, position, *_ in said)
        assert said[:1] in ([], [("bind_weight", 1, parameters[1].data_ptr())])
        assert weights.are_where_bound()
        change(parameters[1])
    assert caplog.text.count("1 weights (p1, ...) were written to outside") == warned  # said once


@pytest.mark.parametrize(
    "replacement", [torch.zeros(5), torch.zeros(6).bfloat16(), torch.zeros(5, 2).bfloat16()[:, 0], torch.zeros(1, 5)]
)
def test_a_weight_of_another_form_is_refused(replacement: torch.Tensor) -> None:
    (parameter,) = make((5,))
    weights = bound_to(RecordedEngine(), [parameter])
    parameter.data = replacement
    with pytest.raises(ConfigError, match=r"p0: .*make a new optimizer"):
        weights.rebind_changed()


def test_weights_that_were_moved_onto_each_other_are_refused() -> None:
    first, second = make((5,), (5,))
    weights = bound_to(RecordedEngine(), [first, second])
    second.data = first.data
    with pytest.raises(ConfigError, match="p0 and p1, which share memory"):
        weights.rebind_changed()


def test_what_was_written_has_a_new_version_and_is_left_so() -> None:
    engine, parameters = RecordedEngine(), make((5,), (5,))
    weights = bound_to(engine, parameters)
    bound, before = weights.of(parameters[0]), parameters[0]._version
    weights.note_different([bound])
    weights.note_written([bound])
    assert (parameters[0]._version, bound.was_different) == (before + 1, False)
    weights.rebind_changed()
    assert engine.said() == []
    for other in (torch.nn.Parameter(torch.zeros(1)), None, "p0"):
        with pytest.raises(ConfigError, match="a parameter that this optimizer updates"):
            weights.of(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("piece", [1 << 20, 3])
def test_weights_differ_from_masters_that_round_to_others(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int
) -> None:
    monkeypatch.setattr(module, "PIECE_NUMEL", piece)
    master = torch.cat([torch.randn(8), torch.tensor([float("inf"), -0.0])])
    parameters = [torch.nn.Parameter(master.to(dtype)), torch.nn.Parameter(master.to(dtype).view(5, 2).t())]
    weights = bound_to(RecordedEngine(), parameters)
    bounds = [weights.of(parameter) for parameter in parameters]
    masters = dict(zip(bounds, (master, master.view(5, 2)), strict=True))  # in the order of memory
    assert differing(masters) == []
    with torch.no_grad():
        parameters[1][1, 3] += 0.5
    assert differing(masters) == bounds[1:]


def test_weights_that_follow_from_masters_which_were_set(caplog: pytest.LogCaptureFixture) -> None:
    """Others than those that somebody has written to since become what the masters say, which is warned of."""
    engine, parameters = RecordedEngine(), make((5,), (4, 2), (3,))
    weights, engine.steps = bound_to(engine, parameters), 1
    bounds = [weights.of(parameter) for parameter in parameters]
    masters = {bound: bound.parameter.detach().float() + 2.0**-20 for bound in bounds}
    for bound in bounds[1:]:
        masters[bound] = masters[bound] + 1
    found = differing(masters)
    assert found == bounds[1:]
    weights.note_different(found)
    with torch.no_grad():
        for bound in bounds[:2]:
            bound.parameter.copy_(masters[bound])  # as a framework that loads weights last
    weights.rebind_changed()
    expected = [(call, n) for n in range(2) for call in ("bind_weight", "match_master")]
    assert [call[:2] for call in engine.said()] == expected
    with caplog.at_level(logging.WARNING, "offload"):
        weights.warn_of_differences()
        weights.warn_of_differences()
    assert caplog.text.count("1 weights (p2, ...) were not those that the loaded masters belong to") == 1


def test_an_fp32_weight_follows_from_nothing() -> None:
    (parameter,) = make((5,), dtype=torch.float32)
    bound = bound_to(RecordedEngine(), [parameter]).of(parameter)
    assert differing({bound: parameter.detach() + 1}) == []
