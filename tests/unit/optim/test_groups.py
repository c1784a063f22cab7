"""Parameter groups: their parameters' names, what a checkpoint keeps of them, and what is taken back."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from offload.errors import CheckpointError, ConfigError
from offload.optim.groups import (
    check_options,
    checked_groups,
    from_json,
    names,
    set_restored,
    to_json,
)


def nothing(group: Any) -> None:
    pass


def refuse_negative(group: Any) -> None:
    if group.get("lr", 0) < 0:
        raise ConfigError("lr", group["lr"], "a number >= 0")


A, B, C = (torch.nn.Parameter(torch.zeros(numel)) for numel in (1, 2, 3))


def test_names_are_given_or_made_of_positions() -> None:
    groups = [{"params": [A], "param_names": ["a"]}, {"params": [B, C]}, {"params": [A], "param_names": [0]}]
    found = names(groups)
    assert [tensor is wanted for (tensor, *_), wanted in zip(found, (A, B, C, A), strict=True)] == [True] * 4
    assert [rest for _, *rest in found] == [
        ["a", 0],
        ["param_groups[1].params[0]", 1],
        ["param_groups[1].params[1]", 1],
        ["0", 2],
    ]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"foreach": True, "fused": None, "capturable": False, "differentiable": False}, None, ""),
        ({"capturable": True}, ConfigError, "CUDA graph"),
        ({"differentiable": True}, ConfigError, "autograd"),
        ({"fuzed": True}, TypeError, r"SGD.__init__\(\).*'fuzed'"),
        ({"fuzed": None}, TypeError, "fuzed"),
    ],
)
def test_options_of_torch_s(options: dict[str, Any], error: Any, words: str) -> None:
    if error is None:
        check_options("SGD", options)
        return
    with pytest.raises(error, match=words):
        check_options("SGD", options)


@pytest.mark.parametrize(
    ("value", "kept", "now", "back"),
    [
        (0.1, 0.1, 1.0, 0.1),
        (3, 3, 1, 3),
        (True, True, False, True),
        (None, None, 1.0, None),
        ("x", "x", "y", "x"),
        ((0.9, 0.99), [0.9, 0.99], (0.0, 0.0), (0.9, 0.99)),
        ([0.9, 0.99], [0.9, 0.99], [0.0, 0.0], [0.9, 0.99]),
        ([[1, (2, 3)]], [[1, [2, 3]]], None, [[1, [2, 3]]]),
        (np.float32(0.5), 0.5, 1.0, 0.5),
        (np.int64(3), 3, 1, 3),
        (np.array([1.0, 2.0]), [1.0, 2.0], np.zeros(2), np.array([1.0, 2.0])),
        (np.array(2.0), 2.0, np.array(0.0), 2.0),
        (torch.tensor(0.25), {"tensor": 0.25}, torch.tensor(1.0), torch.tensor(0.25)),
        (torch.tensor([0.25]), {"tensor": 0.25}, torch.tensor([1.0]), torch.tensor([0.25])),
        (torch.tensor(0.25), {"tensor": 0.25}, 1.0, 0.25),  # it is a number by now
        (0.25, 0.25, torch.tensor(1.0), torch.tensor(0.25)),  # and the other way round
        (torch.tensor([1.0, 2.0]), [1.0, 2.0], torch.zeros(2), torch.tensor([1.0, 2.0])),
        (math.inf, math.inf, 1.0, math.inf),
    ],
    ids=str,
)
def test_a_hyperparameter_comes_back_in_the_kind_that_the_group_has(
    value: Any, kept: Any, now: Any, back: Any
) -> None:
    (saved,) = to_json([{"params": [A], "lr": 0.5, "own": value}])
    assert saved == {"lr": 0.5, "own": kept}
    group: dict[str, Any] = {"params": [A], "lr": 0.1, "own": now}
    held = now.clone() if isinstance(now, torch.Tensor) else now
    (restored,) = from_json(
        json.loads(json.dumps({"optimizer": "SGD", "groups": [saved]})), "ck", "SGD", [group], nothing
    )
    assert not isinstance(now, torch.Tensor) or torch.equal(now, held)  # nothing is set yet
    set_restored([group], [restored])
    assert group["lr"] == 0.5
    assert type(group["own"]) is type(back)
    assert group["own"] == back if isinstance(back, list) else np.array_equal(group["own"], back)
    assert not isinstance(now, torch.Tensor) or group["own"] is now


@pytest.mark.parametrize(
    "value", [object(), {"a": 1}, b"x", 1j, [[[[[1]]]]], torch.zeros(2, dtype=torch.complex64), [object()]]
)
def test_what_json_cannot_say_is_not_kept(value: Any) -> None:
    assert to_json([{"params": [A], "lr": 0.5, "own": value, "foreach": True, "param_names": ["a"]}]) == [{"lr": 0.5}]


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"params": []}, "params"),
        ({"lr": {"tensor": "x"}}, "lr"),
        ({"lr": {"tensor": True}}, "lr"),
        ({"lr": {"tensor": 0.1, "more": 1}}, "lr"),
        ({"lr": {"tensor": None}}, "lr"),
        ({"own": {}}, "own"),
        ({"own": {"a": 1}}, "own"),
        ({"own": [[[[[[1]]]]]]}, "own"),
        ({"lr": -1.0}, "lr"),
        ({"of_tensor": "x"}, r"a tensor of shape \(\) here"),
        ({"of_tensor": [1.0]}, r"a tensor of shape \(\) here"),
        ({"of_tensor": 10**400}, "of_tensor"),
        ({"of_tensors": [1.0]}, r"a tensor of shape \(2,\) here"),
        ({"of_count": math.nan}, "of_count"),
    ],
    ids=str,
)
def test_a_hyperparameter_that_was_never_saved_is_damage(saved: dict[str, Any], words: str) -> None:
    group = {
        "params": [A],
        "of_tensor": torch.tensor(0.5),
        "of_tensors": torch.zeros(2),
        "of_count": torch.tensor(3),
    }
    metadata = {"optimizer": "SGD", "groups": [saved]}
    with pytest.raises(CheckpointError, match=f"^ck is damaged: .*{words}"):
        from_json(metadata, "ck", "SGD", [group], refuse_negative)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "ck is of None, and this is SGD"),
        ({"optimizer": "Lion", "groups": [{}]}, "ck is of Lion, and this is SGD"),
        ({"optimizer": "SGD"}, "ck is damaged: its groups are None"),
        ({"optimizer": "SGD", "groups": [3]}, r"ck is damaged: its groups are \[3\]"),
        (
            {"optimizer": "SGD", "groups": [{}, {}]},
            "of another model: it has 2 parameter groups, and there are 1 here",
        ),
    ],
)
def test_metadata_of_another_optimizer(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        from_json(metadata, "ck", "SGD", [{"params": [A]}], nothing)


GROUPS = [{"params": [A, B]}, {"params": [C]}]


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ([{"params": [0, 1]}, {"params": [2], "lr": 0.1}], None),
        ([{"params": ["a", "b"]}, {"params": ["c"]}], None),
        ([{"params": [0, 1], "param_names": ["a", "b"]}, {"params": [2], "param_names": None}], None),
        ([{"params": [0, 1]}], r"its groups must have \[2, 1\] parameters"),
        ([{"params": [0]}, {"params": [1, 2]}], r"its groups must have \[2, 1\] parameters"),
        ([{}, {"params": [2]}], r"its groups must have \[2, 1\] parameters"),
        ([{"params": [0, 0]}, {"params": [2]}], "a number or a name of its own"),
        ([{"params": [0, 2]}, {"params": [2]}], "a number or a name of its own"),
        ([{"params": [[0], 1]}, {"params": [2]}], "a number or a name of its own"),
        ([{"params": [0, 1], "param_names": ["a"]}, {"params": [2]}], "give each parameter of the group a name"),
        ([{"params": [0, 1], "param_names": ["a", 1]}, {"params": [2]}], "give each parameter of the group a name"),
        ([{"params": [0, 1], "param_names": "ab"}, {"params": [2]}], "give each parameter of the group a name"),
        ([{"params": [0, 1]}, {"params": [2], "lr": -1.0}], "lr"),
        (3, r'it needs a mapping "state" and a list "param_groups"'),
    ],
    ids=str,
)
def test_groups_of_a_state_dict(saved: Any, words: str | None) -> None:
    given = {"state": {}, "param_groups": saved}
    if words is None:
        assert checked_groups(given, GROUPS, refuse_negative) == saved
        return
    with pytest.raises(ConfigError, match=words):
        checked_groups(given, GROUPS, refuse_negative)


def test_a_parameter_in_two_groups_has_one_number() -> None:
    groups = [{"params": [A, B]}, {"params": [A]}]
    saved = [{"params": [0, 1]}, {"params": [0]}]
    assert checked_groups({"state": {}, "param_groups": saved}, groups, nothing) == saved
    for other in (1, 2):
        with pytest.raises(ConfigError, match="of its own"):
            checked_groups({"state": {}, "param_groups": [{"params": [0, 1]}, {"params": [other]}]}, groups, nothing)
    with pytest.raises(ConfigError, match="mapping"):
        checked_groups({"state": [], "param_groups": saved}, groups, nothing)
