"""Packed state: numbers stay what they are, tensors can be saved alone, and what cannot be packed changes nothing."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch

from offload.optim.packing import Form, Packing


def packed(**state: Any) -> tuple[Packing, torch.Tensor]:
    """Return a packing of a state's forms, and words that hold the state."""
    packing = Packing({key: Form.of(value) for key, value in state.items()}, 1)
    words = torch.zeros(packing.words)
    packing.store(words, state)
    return packing, words


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


@pytest.mark.parametrize("number", [0, -1, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 1000009000027000027])
def test_integers_are_exact_up_to_64_bits(number: int) -> None:
    packing, words = packed(seed=number, other=1.5)
    assert packing.load(words) == {"seed": number, "other": 1.5}
    assert packing.cast({"seed": number})["seed"] == number
    packing.store(words, {"seed": 3, "other": -0.0})  # and the mark of a large one goes
    assert packing.load(words)["seed"] == 3
    assert math.copysign(1, packing.load(words)["other"]) == -1


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
def test_larger_ones_are_refused_and_nothing_changes(number: int) -> None:
    with pytest.raises(TypeError, match="more than 64 bits"):
        Form.of(number)
    packing, words = packed(mean=torch.ones(3), seed=7)
    before = words.clone()
    with pytest.raises(TypeError, match="'seed' is an integer of more than 64 bits"):
        packing.store(words, {"mean": torch.zeros(3), "seed": number})
    assert torch.equal(words, before)


LARGE = 2**53 + 1


@pytest.mark.parametrize(
    ("was", "given", "found"),
    [
        (1, LARGE, LARGE),
        (1, torch.tensor(LARGE), LARGE),
        (1, np.int64(LARGE), LARGE),
        (1, 5.0, 5),
        (1, torch.tensor(5.0), 5),
        (1, True, 1),
        (True, 1, True),
        (0.5, 3, 3.0),
        (0.5, math.nan, math.nan),
        (0.5, -math.inf, -math.inf),
        (torch.tensor(1), LARGE, torch.tensor(LARGE)),
        (torch.tensor(1.0), 7, torch.tensor(7.0)),
        (torch.tensor(1.0), 0.1, torch.tensor(0.1)),
        (torch.tensor(1.0, dtype=torch.float64), 0.1, torch.tensor(0.1, dtype=torch.float64)),
        (torch.ones(2), np.array([0.1, 2.0]), torch.tensor([0.1, 2.0])),
        (torch.ones(2).bfloat16(), torch.tensor([0.1, math.nan]), torch.tensor([0.1, math.nan]).bfloat16()),
        (torch.ones(2, dtype=torch.int8), torch.tensor([3.0, -4.0]), torch.tensor([3, -4], dtype=torch.int8)),
    ],
)
def test_values_get_the_form_that_was_found(was: Any, given: Any, found: Any) -> None:
    packing, words = packed(value=was)
    cast = packing.cast({"value": given})
    packing.store(words, cast)
    loaded = packing.load(words)["value"]
    if isinstance(found, torch.Tensor):
        assert loaded.dtype is found.dtype
        assert torch.equal(loaded.nan_to_num(9), found.nan_to_num(9))
    else:
        assert same(loaded, found)


@pytest.mark.parametrize(
    ("was", "given"),
    [
        (1, 1.5),
        (1, math.nan),
        (1, math.inf),
        (1, 2**64),
        (True, 2),
        (0.5, LARGE),
        (torch.tensor(1.0), LARGE),
        (torch.tensor(1.0), torch.tensor(LARGE)),
        (torch.ones(2, dtype=torch.int8), torch.tensor([3, 300])),
        (torch.ones(2, dtype=torch.int8), torch.tensor([3, 1.5])),
        (torch.ones(2, dtype=torch.int8), torch.tensor([3, math.nan])),
        (torch.tensor(1), 2**63),
        (torch.tensor(1), 2**70),
        (torch.tensor(1.0), "text"),
        (torch.ones(2), [[1.0], [1.0, 2.0]]),
        (torch.ones(2), torch.ones(2, dtype=torch.complex64) * 1j),
        (1, "text"),
        (1, None.__class__),
        (torch.ones(2), torch.ones(3)),
    ],
)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_values_that_would_be_others_are_refused_by_key(was: Any, given: Any) -> None:
    packing, words = packed(value=was)
    before = words.clone()
    with pytest.raises(TypeError, match="'value'"):
        packing.store(words, packing.cast({"value": given}))
    assert torch.equal(words, before)


def test_each_tensor_has_a_storage_of_its_own() -> None:
    state = {"step": torch.tensor(3.0), "mean": torch.randn(40).bfloat16(), "signs": torch.ones(40, dtype=torch.int8)}
    packing, words = packed(**state)
    loaded = packing.load(words)
    file = io.BytesIO()
    torch.save(loaded, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    for key, value in state.items():
        assert torch.equal(again[key], value)
        assert loaded[key].untyped_storage().nbytes() == value.nbytes
    loaded["mean"].zero_()  # in place all the same
    assert not packing.load(words)["mean"].any()
    packing.store(words, {"step": loaded["step"], "mean": loaded["mean"], "signs": loaded["signs"]})
    del words
    assert loaded["step"] == 3


def test_tensors_that_change_places_are_read_before_they_are_written() -> None:
    packing, words = packed(now=torch.zeros(30), before=torch.ones(30), part=torch.zeros(3))
    found = packing.load(words)
    packing.store(words, {"now": found["before"], "before": found["now"], "part": found["before"][5:8]})
    found = packing.load(words)
    assert found["now"].all()
    assert not found["before"].any()
    assert found["part"].all()
