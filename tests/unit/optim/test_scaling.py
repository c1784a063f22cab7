"""The factors of the next step: which they are, and for which gradients they hold."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import pytest
import torch

from offload.errors import ConfigError
from offload.optim.scaling import GradientId, Scaling
from offload.optim.weights import BoundParameter


def make(count: int = 2) -> list[BoundParameter]:
    """Return parameters, each with a gradient that has arrived once."""
    bounds = []
    for number in range(count):
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.full((3,), number + 1.0)
        form = (parameter.dtype, parameter.shape, parameter.stride(), parameter.shape)
        bounds.append(BoundParameter(parameter, number, f"p{number}", form, (0, 0), None, arrivals=1))
    return bounds


def ids(bounds: list[BoundParameter]) -> list[tuple[BoundParameter, GradientId | None]]:
    """Return what tells the gradients apart, as a route does where they stay in `.grad`."""
    grads = [(bound, bound.parameter.grad) for bound in bounds]
    return [(b, None if g is None else GradientId(weakref.ref(g), g._version, g.data_ptr())) for b, g in grads]


@pytest.mark.parametrize(
    ("max_norm", "norm", "clip", "remembered"),
    [
        (1.0, 4.0, 1.0 / (4.0 + 1e-6), True),
        (1.0, 0.5, 1.0, True),  # nothing to scale, but the caller may not change them any more
        (1.0, 1.0, 1.0, True),
        (1.0, 1.0 + 1e-9, 1.0 / (1.0 + 1e-9 + 1e-6), True),
        (math.inf, 4.0, 1.0, False),  # the norm alone is asked for
        (0.0, 4.0, 0.0, True),
        (1.0, math.inf, 0.0, True),
        (1.0, math.nan, math.nan, True),
        (math.nan, 4.0, 1.0, False),  # as min(1, nan) is 1 in Python
    ],
)
def test_the_factor_of_clipping(max_norm: float, norm: float, clip: float, remembered: bool) -> None:
    scaling, bounds = Scaling(), make()
    scaling.clip_to(max_norm, norm, ids(bounds))
    assert scaling.clip == clip or (math.isnan(scaling.clip) and math.isnan(clip))
    assert scaling.norm == norm or math.isnan(norm)
    assert set(scaling.scaled_ids) == (set(bounds) if remembered else set())


def test_factors_are_multiplied_and_norms_have_them() -> None:
    scaling, bounds = Scaling(), make()
    assert scaling.norm_with_factors(25.0) == 5.0
    scaling.unscale(-8.0, ids(bounds))
    assert (scaling.loss_scale, scaling.clip) == (-8.0, 1.0)
    assert scaling.norm_with_factors(25.0) == 0.625
    scaling.clip_to(0.3125, 0.625, ids(bounds))
    once = scaling.clip
    assert once == pytest.approx(0.5, rel=1e-5)
    assert scaling.norm_with_factors(25.0) == pytest.approx(0.3125, rel=1e-5)
    scaling.clip_to(0.1, 0.2, ids(bounds))
    assert scaling.clip == once * (0.1 / (0.2 + 1e-6))
    scaling.reset()
    assert (scaling.loss_scale, scaling.clip, scaling.scaled_ids) == (1.0, 1.0, {})


# What happens to gradients between the clip and the step; and what the step does with the factor.

Change = Callable[[Scaling, BoundParameter], None]
KEEPS, FORGETS, CHANGED, MORE = "keeps", "forgets", "was replaced or changed", "more gradient has arrived"


def replace(scaling: Scaling, bound: BoundParameter) -> None:
    bound.parameter.grad = bound.parameter.grad.clone()


def replace_data(scaling: Scaling, bound: BoundParameter) -> None:
    bound.parameter.grad.data = bound.parameter.grad.data + 1


def write(scaling: Scaling, bound: BoundParameter) -> None:
    bound.parameter.grad.add_(1)


def zero(scaling: Scaling, bound: BoundParameter) -> None:
    bound.parameter.grad.zero_()


def drop(scaling: Scaling, bound: BoundParameter) -> None:
    bound.parameter.grad = None


def arrive_onto(scaling: Scaling, bound: BoundParameter, builds_graph: bool = False) -> None:
    bound.parameter.grad.add_(1)
    bound.arrivals += 1
    scaling.note_arrival(bound, bound.parameter.grad, builds_graph)


def arrive_beside(scaling: Scaling, bound: BoundParameter, builds_graph: bool = False) -> None:
    bound.parameter.grad = torch.ones(3)
    arrive_onto(scaling, bound, builds_graph)


def arrive_with_a_graph(scaling: Scaling, bound: BoundParameter) -> None:
    arrive_beside(scaling, bound, True)


def add_where_it_has_left(scaling: Scaling, bound: BoundParameter) -> None:
    scaling.note_addition(bound)


def zero_then_arrive_onto(scaling: Scaling, bound: BoundParameter) -> None:
    zero(scaling, bound)
    arrive_onto(scaling, bound)


def nothing(scaling: Scaling, bound: BoundParameter) -> None:
    pass


@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        (nothing, nothing, KEEPS),
        (nothing, replace, CHANGED),
        (nothing, replace_data, CHANGED),
        (nothing, write, CHANGED),
        (replace, write, CHANGED),
        (nothing, drop, KEEPS),
        (nothing, zero, KEEPS),  # zeros stay zeros with any factor
        (drop, drop, FORGETS),
        (zero, zero, FORGETS),
        (nothing, arrive_onto, MORE),
        (nothing, arrive_beside, MORE),
        (nothing, arrive_with_a_graph, MORE),
        (nothing, add_where_it_has_left, MORE),
        (drop, arrive_onto, MORE),
        (drop, arrive_with_a_graph, MORE),  # nobody can tell what it was added to
        (drop, arrive_beside, FORGETS),  # the step was skipped: new gradients alone
        (arrive_beside, arrive_beside, FORGETS),
        (zero_then_arrive_onto, zero_then_arrive_onto, FORGETS),
        (replace, arrive_beside, FORGETS),  # one was new, none is what was clipped
    ],
)
@pytest.mark.parametrize("scales", [False, True])
def test_what_a_step_finds(first: Change, second: Change, outcome: str, scales: bool) -> None:
    scaling, bounds = Scaling(), make()
    if scales:
        scaling.unscale(8.0, ids(bounds))
    else:
        scaling.clip_to(1.0, 4.0, ids(bounds))
    factors = scaling.clip, scaling.loss_scale
    held = [bound.parameter.grad for bound in bounds]  # else a new one may have its address
    first(scaling, bounds[0])
    second(scaling, bounds[1])
    if outcome in (KEEPS, FORGETS):
        scaling.check(ids(bounds))
        assert (scaling.clip, scaling.loss_scale) == (factors if outcome == KEEPS else (1.0, 1.0))
        return
    with pytest.raises(ConfigError, match=outcome) as refused:
        scaling.check(ids(bounds))
    assert outcome == MORE or "p1" in str(refused.value) or first is replace
    assert (scaling.clip, scaling.loss_scale) == factors
    del held


def test_gradients_of_a_group_that_was_added_have_no_factor() -> None:
    scaling, bounds = Scaling(), make(3)
    scaling.clip_to(1.0, 4.0, ids(bounds[:2]))
    bounds[2].arrivals = 0  # assigned
    with pytest.raises(ConfigError, match=r"p2 was replaced"):
        scaling.check(ids(bounds))


def test_a_factor_that_is_nan_holds_for_no_other_gradient() -> None:
    scaling, bounds = Scaling(), make()
    scaling.clip_to(1.0, math.nan, ids(bounds))
    zero(scaling, bounds[1])
    with pytest.raises(ConfigError, match="was replaced or changed"):
        scaling.check(ids(bounds))  # NaN times zero


def test_without_a_factor_nothing_is_refused() -> None:
    scaling, bounds = Scaling(), make()
    scaling.clip_to(math.inf, 4.0, ids(bounds))
    for bound in bounds:
        write(scaling, bound)
    scaling.check(ids(bounds))
    assert scaling.clip == 1.0
